"""Limits on values: every plausible value is accepted, and no larger one reaches the rest of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gracetune.config.base import LONGEST_FILE_NAME, FileName, file_name
from gracetune.config.limits import LARGEST_RANK
from unit.config.aitoolkit_jobs import job, read
from unit.config.test_resolve import problems, resolve

FILE_NAME: TypeAdapter[str] = TypeAdapter(FileName)


def dataset(**values: Any) -> dict[str, Any]:
    return {"datasets": [{"id": "a", "path": "p", **values}]}


@pytest.mark.parametrize(
    ("changes", "key", "expected", "hint"),
    [
        ({"training": {"max_steps": 10**26}}, "training.max_steps", "<= 10,000,000,000", "1, for example"),
        ({"training": {"epochs": 10**6}}, "training.epochs", "<= 100,000", "1, for example"),
        ({"training": {"max_steps": 1, "seed": 2**63}}, "training.seed", "< 9,223,372,036,854,775,808", "42, for"),
        ({"training": {"max_steps": 1, "batch_size": 10**8}}, "training.batch_size", ">= 1 and <= 16,384", "1, for"),
        (dataset(repeats=10**21), "datasets[0].repeats", "<= 1,000,000", "0, for example"),
        (dataset(resolution=1e300), "datasets[0].resolution", "<= 8192", "1024, for example"),
        (dataset(in_memory={"memory_limit_gb": 1e300}), "datasets[0].in_memory.memory_limit_gb", "<= 1,000,000", "1,"),
        (dataset(audio={"duration_interval": 5e-324}), "datasets[0].audio.duration_interval", ">= 0.01", "3, for"),
        (dataset(crop={"aspect_buckets": [1e-9]}), "datasets[0].crop.aspect_buckets[0]", ">= 0.0625 and <= 16", ""),
        ({"adapter": {"rank": 99999999}}, "adapter.rank", "at most 16,384 for lora", "lokr with `full_rank: true`"),
        ({"adapter": {"by_module": {"A": {"dim": 99999999}}}}, "adapter.by_module.A.dim", "16,384 for lora", "full_d"),
        ({"name": "../escaped"}, "name", "a file name: no folder", "write `..-escaped`"),
        ({"name": "x" * 300}, "name", f"at most {LONGEST_FILE_NAME} bytes", f"write `{'x' * LONGEST_FILE_NAME}`"),
        ({"name": " "}, "name", "a file name", "write `my-run`"),
    ],
)  # fmt: skip
def test_beyond_them_the_error_says_what_to_type(
    tmp_path: Path, changes: dict[str, Any], key: str, expected: str, hint: str
) -> None:
    found = problems(tmp_path, changes)
    assert set(found) == {key}
    assert expected in found[key].expected
    assert hint in found[key].hint


@pytest.mark.parametrize(
    "changes",
    [
        dataset(resolution=8192), dataset(resolution=64, resolution_type="area"), dataset(repeats=1_000_000),
        dataset(resolution=0.25, resolution_type="area"), dataset(maximum_size=1e6, downsample_to=2048),
        {"adapter": {"rank": LARGEST_RANK}},
        {"adapter": {"kind": "lokr", "rank": 9999999999, "alpha": 9999999999, "full_rank": True}},
        {"adapter": {"kind": "lokr", "by_module": {"A": {"linear_dim": 100000}}}},
        {"training": {"max_steps": 10**9, "seed": 2**63 - 1}}, {"optimizer": {"eps": 1e-30}},
        {"name": "été 2025, v1.2 (最終)"},
    ],
)  # fmt: skip
def test_what_people_write_is_inside_them(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert resolve(tmp_path, changes)


def test_pixels_where_megapixels_are_meant(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, dataset(resolution=1024, resolution_type="area")).values()
    assert problem.found == "1024 megapixels"
    assert problem.hint == "if 1024 is in pixels, write `resolution_type: pixel_area`, or 1 for as many megapixels"


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=400))
@example("..")
@example("a/b\\c\0d")
@example("é" * 150)
def test_any_text_becomes_a_file_name(text: str) -> None:
    name = file_name(text)
    if text.strip():
        assert FILE_NAME.validate_python(name) == name
    else:
        assert not name
    try:
        FILE_NAME.validate_python(text)
    except ValidationError:
        return
    assert name == text.strip()


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "a\\b", "/", "a\0b", "x" * 201, "é" * 101])
def test_what_is_no_file_name_is_rejected(name: str) -> None:
    with pytest.raises(ValidationError):
        FILE_NAME.validate_python(name)


def test_an_ai_toolkit_job_goes_on_working_whatever_its_name(tmp_path: Path) -> None:
    document = job()
    document["config"]["name"] = "cats/v2"
    config = read(tmp_path, document).config
    assert config.name == "cats-v2"
    assert config.output_dir == "output/cats/v2"
