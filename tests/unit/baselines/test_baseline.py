"""The file of a baseline: what is written is read back, and a file of another kind is rejected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gracetune.baselines.baseline import FILE, VERSION, read_baseline
from gracetune.baselines.rendering import report
from gracetune.telemetry.errors import TelemetryError
from unit.baselines.sample_baselines import baseline


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(baseline(**changes).to_json())
    return folder


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = baseline(name="ä run", final_losses={"high_noise": 0.5, "low_noise": 0.25})
    (tmp_path / FILE).write_text(made.to_json(), encoding="utf-8")
    assert read_baseline(tmp_path) == made
    assert read_baseline(tmp_path / FILE) == made


def test_a_loss_that_is_no_number_is_kept(tmp_path: Path) -> None:
    assert math.isnan(read_baseline(written(tmp_path, final_losses={"": math.nan})).final_losses[""])


def test_fields_of_a_later_release_are_passed_over(tmp_path: Path) -> None:
    value = json.loads(baseline().to_json()) | {"new": 1}
    (tmp_path / FILE).write_text(json.dumps(value))
    assert read_baseline(tmp_path) == baseline()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "a file that is no text"),
        (b'{"format": "gracetune-baseline", "ver', "no JSON, cut off or changed"),
        (b"[1, 2]", "JSON, but no baseline"),
        (b'{"format": "other"}', "JSON, but no baseline"),
        (b"[" * 100_000, "no JSON"),
        (b'{"format": "gracetune-baseline", "version": 2}', "a baseline of version 2"),
        (b'{"format": "gracetune-baseline"}', "a baseline of version None"),
        (b'{"format": "gracetune-baseline", "version": true}', "a baseline of version True"),
        (b'{"format": "gracetune-baseline", "version": 1}', "name: Field required"),
    ],
)
def test_what_is_no_baseline_of_ours_is_told(content: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(TelemetryError) as error:
        read_baseline(tmp_path)
    assert found in error.value.found
    assert "gracetune baseline capture CONFIG" in error.value.hint


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ({"ms": [1.0, 0.0]}, "steps.ms.1"),
        ({"ms": [1.0, "NaN"]}, "steps.ms.1"),
        ({"ms": []}, "steps.ms"),
        ({"ms": [1.0, 2.0], "samples": [1]}, "not equally long"),
        ({"samples": [0] * 30}, "steps.samples.0"),
    ],
)
def test_numbers_that_cannot_be_are_rejected(steps: dict[str, Any], found: str, tmp_path: Path) -> None:
    value = json.loads(baseline().to_json())
    value["steps"] |= steps
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(TelemetryError, match=found):
        read_baseline(tmp_path)


def test_a_missing_file_and_an_empty_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match="No such file"):
        read_baseline(tmp_path / "nothing")
    with pytest.raises(TelemetryError, match=r"no baseline\.json in this folder"):
        read_baseline(tmp_path)


def test_the_report_has_everything_a_reader_looks_for() -> None:
    text = report(baseline(notes=("a warning",), environment={"OMP_NUM_THREADS": "1"}))
    for expected in (
        "Baseline of tiny",
        "no GPU; a CPU, 2 cores",
        "torch 2.13.0",
        "OMP_NUM_THREADS=1",
        "30 measured, 10 before them as warm-up",
        "100 ms in the middle",
        "20 samples/s",
        "1.0 s in the first batch",
        "host       1.00 GiB",
        "cache.latents.hit_rate",
        "uvm.stage                          not available: not open",
        "nvidia-smi   not available: no nvidia-smi on the PATH",
        "a warning",
    ):
        assert expected in text


def test_the_document_names_every_field() -> None:
    document = (Path(__file__).parents[3] / "docs" / "baselines.md").read_text()
    assert f"version {VERSION}" in document
    missing = [name for name in json.loads(baseline().to_json()) if f"`{name}`" not in document]
    assert missing == []
