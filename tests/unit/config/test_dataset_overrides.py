"""`--set` addresses datasets by the entry of the file's own list, whatever it was split into, or by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, Resolved, load
from gracetune.errors import ConfigError
from unit.config import aitoolkit_jobs as jobs
from unit.config import simpletuner_files as files
from unit.config import test_resolve as native

ENTRIES = [
    {"folder_path": "/data/cats", "resolution": [512, 768, 1024]},
    {"folder_path": "/data/dogs", "resolution": [512, 768]},
]


def read(folder: Path, *overrides: str, datasets: list[dict[str, Any]] | None = None, **sections: Any) -> Resolved:
    document = jobs.job(datasets=ENTRIES if datasets is None else datasets, **sections)
    return load(jobs.write(folder, document), environment=Environment({}), overrides=overrides)


def values(resolved: Resolved, name: str) -> dict[str, Any]:
    return {dataset.id: dataset.model_dump()[name] for dataset in resolved.config.datasets}


def test_an_entry_is_reached_whatever_its_resolutions_were_split_into(tmp_path: Path) -> None:
    found = values(read(tmp_path, "datasets[1].repeats=4", "datasets[0].path=/other"), "repeats")
    assert found == {"cats-512": 0, "cats-768": 0, "cats-1024": 0, "dogs-512": 4, "dogs-768": 4}
    resolved = read(tmp_path, "datasets[0].path=/other")
    assert [*values(resolved, "path").values()] == ["/other"] * 3 + ["/data/dogs"] * 2
    assert str(resolved.origins["datasets", 2, "path"]) == "flag --set datasets[0].path"


def test_a_dataset_is_reached_by_its_id_in_every_dialect(tmp_path: Path) -> None:
    found = values(read(tmp_path, "datasets[dogs-768].repeats=4"), "repeats")
    assert found == {"cats-512": 0, "cats-768": 0, "cats-1024": 0, "dogs-512": 0, "dogs-768": 4}
    resolved = files.resolve(tmp_path, overrides=["datasets[clips].repeats=3"])
    assert values(resolved, "repeats") == {"clips": 3}
    assert values(native.resolve(tmp_path, overrides=["datasets.stills.repeats=3"]), "repeats") == {
        "clips": 0, "stills": 3
    }  # fmt: skip


def test_references_are_reached_by_their_ids(tmp_path: Path) -> None:
    entries = [{"folder_path": "/data/cats", "resolution": [512, 768], "control_path": "/data/before"}]
    resolved = read(tmp_path, "datasets[cats-768-control-1].path=/other", datasets=entries, model=jobs.QWEN_EDIT)
    assert values(resolved, "path")["cats-768-control-1"] == "/other"
    assert values(resolved, "path")["cats-512-control-1"] == "/data/before"


def test_one_resolution_takes_the_place_of_the_list(tmp_path: Path) -> None:
    entries = [{"folder_path": "/data/cats", "resolution": [512, 768], "control_path": "/data/before"}]
    resolved = read(tmp_path, "datasets[0].resolution=640", datasets=entries, model=jobs.QWEN_EDIT)
    assert values(resolved, "resolution")["cats-512"] == 640
    assert values(resolved, "disabled") == {
        "cats-512": False, "cats-768": True, "cats-512-control-1": False, "cats-768-control-1": True,
    }  # fmt: skip


def test_a_dataset_behind_the_last_entry_is_a_new_one(tmp_path: Path) -> None:
    resolved = read(tmp_path, "datasets[2].id=birds", "datasets[2].path=/data/birds")
    assert [*values(resolved, "path").values()][-1] == "/data/birds"
    assert len(resolved.config.datasets) == 6


@pytest.mark.parametrize(
    ("override", "hint"),
    [("datasets[dog-768].repeats=1", "datasets[dogs-768]"), ("datasets[7].repeats=1", "count entries from 0")],
)
def test_what_is_not_there_is_named(tmp_path: Path, override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, override)
    (problem,) = caught.value.problems
    assert problem.key == f"--set {override.partition('=')[0]}"
    assert hint in problem.hint


def test_a_hint_names_an_entry_as_set_takes_it(tmp_path: Path) -> None:
    resolved = read(tmp_path, "datasets[1].captions.keep_tags=2")
    (note,) = [note for note in resolved.notes if "no effect" in note]
    assert note.endswith("--set datasets[1].captions.shuffle_tags=true")
