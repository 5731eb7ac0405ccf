"""The configs SimpleTuner publishes for our families: each is accepted, or rejected for the keys recorded here.

Recorded from release 4.10.1 with its texts replaced by our own; key names, numbers and choices are as published.
Nearly all of them train on datasets of a hub; each is also tried with a folder instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, load
from gracetune.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden" / "peers" / "simpletuner.json"
PUBLISHED: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
OF_THE_HUB = ("dataset_name", "huggingface", "metadata_backend")


def outcome(folder: Path, example: dict[str, Any], files: dict[str, Any]) -> str | list[str]:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    path = folder / "config.json"
    path.write_text(json.dumps(example["keys"]), encoding="utf-8")
    try:
        load(path, environment=Environment({}))
    except ConfigError as error:
        return sorted({problem.key for problem in error.problems})
    return "accepted"


def in_a_folder(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("type") != "huggingface":
        return entry
    kept = {key: value for key, value in entry.items() if key not in OF_THE_HUB}
    captions = "textfile" if entry.get("caption_strategy") == "huggingface" else entry.get("caption_strategy")
    return {**kept, "type": "local", "instance_data_dir": "datasets/{id}", "caption_strategy": captions}


@pytest.mark.parametrize("example", PUBLISHED, ids=lambda example: example["name"])
def test_published_configs(tmp_path: Path, example: dict[str, Any]) -> None:
    assert outcome(tmp_path, example, example["files"]) == example["expected"]


@pytest.mark.parametrize("example", PUBLISHED, ids=lambda example: example["name"])
def test_published_configs_on_a_folder_of_files(tmp_path: Path, example: dict[str, Any]) -> None:
    files = dict(example["files"])
    files["data_backend_config"] = [in_a_folder(entry) for entry in files.get("data_backend_config", ())]
    if not files["data_backend_config"]:
        del files["data_backend_config"]
    assert outcome(tmp_path, example, files) == example["expected_with_local_data"]


def test_some_of_them_are_accepted() -> None:
    accepted = [example["name"] for example in PUBLISHED if example["expected"] == "accepted"]
    assert len(PUBLISHED) == 29
    assert len(accepted) >= 5
