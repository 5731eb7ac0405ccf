from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from gracetune.config import Environment, load, native
from gracetune.config.draft import Origin
from gracetune.config.run_config import RunConfig
from gracetune.config.syntax import Document
from gracetune.redaction import Redactor
from unit.config.strategies import valid_values

SLOW_TO_DRAW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def reread(text: str) -> RunConfig:
    document = Document(Path("x.yaml"), "YAML", text, None).reparsed()
    assert document.problems == ()
    data = document.data
    assert data.pop(native.VERSION_KEY) == native.VERSION
    return RunConfig.model_validate(data)


@SLOW_TO_DRAW
@given(valid_values())
def test_what_show_prints_reads_back_as_the_same_config(tree: dict[str, Any]) -> None:
    config = RunConfig.model_validate(tree)
    text = native.write(config)
    assert reread(text) == config
    assert native.write(reread(text)) == text


@SLOW_TO_DRAW
@given(valid_values())
def test_origins_are_comments_and_change_nothing(tree: dict[str, Any]) -> None:
    config = RunConfig.model_validate(tree)
    origins = {
        ("name",): Origin("file", "name", "weird # name: {file}.yaml"),
        ("model",): Origin("flag", "--set model"),
    }
    shown = reread(native.show(config, origins, Redactor()))
    assert shown == RunConfig.model_validate(native.shareable(config))
    assert shown == config or native.has_secrets(config)


def test_every_leaf_names_its_origin() -> None:
    config = RunConfig.model_validate(
        {"name": "n", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [{"id": "a", "path": "p"}]}
    )
    origins = {("model", "family"): Origin("file", "model_family", "c.json"), ("name",): Origin("environment", "NAME")}
    flat = native.flat(config, origins)
    assert flat["model.family"] == {"kind": "file", "where": "c.json", "key": "model_family"}
    assert flat["name"]["kind"] == "environment"
    assert flat["datasets[0].crop.style"]["kind"] == "default"
    text = native.show(config, origins, Redactor())
    commented = [line for line in text.splitlines() if "  # " in line]
    assert len(commented) == len(flat)
    assert any(line.startswith("  family: sdxl") and line.endswith("# file c.json model_family") for line in commented)


@pytest.mark.parametrize("key", ["a\nb: 1", "a\u2028b", "\x85", "k" * 400, "# x"])
def test_a_key_or_a_file_name_cannot_leave_its_comment(key: str) -> None:
    config = RunConfig.model_validate(
        {"name": "n", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [{"id": "a", "path": "p"}],
         "optimizer": {"options": {key: 1}}}
    )  # fmt: skip
    origins = {("optimizer", "options", key): Origin("file", f"optimizer.options.{key}", f"c\n{key}.yaml")}
    text = native.show(config, origins, Redactor())
    assert reread(text) == config
    assert len(text.splitlines()) == len(native.write(config).splitlines())


def test_the_format_is_plain_yaml() -> None:
    config = RunConfig.model_validate(
        {"name": "yes", "output_dir": "1e3", "model": {"family": "wan"}, "datasets": [{"id": "- a", "path": "a: b #c"}]}
    )
    data = yaml.safe_load(native.write(config))
    assert (data["name"], data["output_dir"], data["datasets"][0]["id"]) == ("yes", "1e3", "- a")


def test_only_the_version_key_marks_the_dialect() -> None:
    assert native.looks_like({"gracetune": 1})
    assert not native.looks_like({"name": "x"})
    assert not native.looks_like(["gracetune"])


@pytest.mark.parametrize(("value", "notes"), [("null", 0), ("/images", 1)])
def test_a_config_of_an_earlier_run_is_read(value: str, notes: int, tmp_path: Path) -> None:
    """It has a key that never had an effect, and was removed."""
    values = {"name": "n", "output_dir": "o", "model": {"family": "wan"}, "datasets": [{"id": "d", "path": "p"}]}
    config = RunConfig.model_validate({**values, "training": {"max_steps": 1}})
    lines = native.write(config).splitlines()
    lines.insert(lines.index("cache:") + 1, f"  image_embeds_dir: {value}")
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines))
    found = load(path, environment=Environment({}))
    assert found.config == config
    assert sum("image_embeds_dir" in note for note in found.notes) == notes


@pytest.mark.parametrize("datasets", ["data/photos/", ["data/photos"], {"id": "photos", "path": "data/photos/"}])
def test_a_folder_alone_is_a_dataset(datasets: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    tree = {"gracetune": 1, "name": "a", "output_dir": "out", "model": {"family": "sdxl"}, "training": {"max_steps": 1}}
    tree |= {"datasets": datasets, "validation": {"prompts": ["a cat", {"prompt": "a dog"}]}}
    path.write_text(yaml.safe_dump(tree))
    config = load(path, environment=Environment({})).config
    assert [(one.id, one.path.rstrip("/")) for one in config.datasets] == [("photos", "data/photos")]
    assert [one.prompt for one in config.validation.prompts] == ["a cat", "a dog"]


def short(folder: Path, changes: dict[str, Any], *flags: str) -> RunConfig:
    path = folder / "run.yaml"
    tree = {"gracetune": 1, "name": "a", "output_dir": "out", "model": {"family": "sdxl"}, "training": {"max_steps": 1}}
    path.write_text(yaml.safe_dump({**tree, "datasets": "photos", **changes}))
    return load(path, environment=Environment({}), overrides=flags).config


def test_a_name_alone_is_an_adapter_an_optimizer_or_a_schedule(tmp_path: Path) -> None:
    config = short(tmp_path, {"adapter": "lokr", "optimizer": "adamw", "schedule": "cosine"})
    assert (config.adapter.kind, config.optimizer.name, config.schedule.name) == ("lokr", "adamw", "cosine")


def test_short_forms_are_read_from_flags_too(tmp_path: Path) -> None:
    """A name changes the kind, and leaves the section's other values as they are."""
    changes = {"adapter": {"kind": "lora", "rank": 5}, "validation": {"prompts": "a cat"}}
    config = short(tmp_path, changes, "adapter=dora", "datasets=more/dogs")
    assert (config.adapter.kind, config.adapter.rank) == ("dora", 5)
    assert [(one.id, one.path) for one in config.datasets] == [("dogs", "more/dogs")]
    assert [one.prompt for one in config.validation.prompts] == ["a cat"]
    config = short(tmp_path, changes, "datasets[0]=dogs", "validation.prompts=[a dog, {prompt: a cow}]")
    assert [one.id for one in config.datasets] == ["dogs"]
    assert [one.prompt for one in config.validation.prompts] == ["a dog", "a cow"]
    config = short(tmp_path, changes, "validation.prompts[1]=a cow")
    assert [one.prompt for one in config.validation.prompts] == ["a cat", "a cow"]
