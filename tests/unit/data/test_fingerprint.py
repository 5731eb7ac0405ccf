from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dataset_config import Augmentation, Dataset
from gracetune.data.errors import DataError
from gracetune.data.fingerprint import Fingerprint, differences, fingerprint
from unit.data.folders import image, images, index_of, write


def of(tmp_path: Path, folder: Path, **values: Any) -> Fingerprint:
    return index_of(tmp_path, {"path": str(folder), **values}).fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "data", images(4))


def test_it_survives_json(tmp_path: Path, folder: Path) -> None:
    found = of(tmp_path, folder)
    assert Fingerprint.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_another_version_is_rejected(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="version 99"):
        Fingerprint.from_json({**of(tmp_path, folder).as_json(), "version": 99})


def test_moving_or_staging_the_data_changes_nothing(tmp_path: Path, folder: Path) -> None:
    before = of(tmp_path, folder)
    moved = folder.rename(tmp_path / "elsewhere")
    after = of(tmp_path, moved, type="in_memory", in_memory={"compression": "lz4"}, corrupt_threshold=0.5)
    assert differences(before, after) == ()


@pytest.mark.parametrize(
    ("files", "values", "message"),
    [
        ({"new.png": image(seed=9)}, {}, "dataset d0: 4 samples then, 5 now"),
        ({"001.png": image(96, 64, seed=9)}, {}, "dataset d0: other files"),
        ({"001.png": image(64, 96)}, {}, "dataset d0: other files, other buckets or visits"),
        ({"001.txt": "another caption"}, {}, "dataset d0: other captions"),
        ({}, {"repeats": 1}, "dataset d0: other buckets or visits, other settings"),
        ({}, {"probability": 2.0}, "dataset d0: other settings"),
        ({}, {"resolution": 128.0}, "dataset d0: other buckets or visits, other settings"),
        ({}, {"captions": {"dropout": 0.5}}, "dataset d0: other settings"),
        ({}, {"captions": {"trigger_word": "sks"}}, "dataset d0: other captions"),
        ({}, {"augmentation": {"flip_x": True}}, "dataset d0: other settings"),
    ],
)
def test_differences_are_listed(
    tmp_path: Path, folder: Path, files: dict[str, bytes | str], values: dict[str, Any], message: str
) -> None:
    before = of(tmp_path, folder)
    write(folder, files)
    assert differences(before, of(tmp_path, folder, **values)) == (message,)


def test_other_masks_and_other_references_are_other_files(tmp_path: Path, folder: Path) -> None:
    masks = write(tmp_path / "masks", {"001.png": image(96, 64, seed=1)})
    sources = write(tmp_path / "sources", {f"{n:03}.png": image(seed=n) for n in range(4)})

    def found() -> Fingerprint:
        target = {"path": str(folder), "mask": {"path": str(masks)}, "conditioning": ["d1"]}
        pair = {"path": str(sources), "dataset_type": "conditioning"}
        return fingerprint([index_of(tmp_path, target, pair).datasets[0]])

    before = found()
    write(masks, {"001.png": image(96, 64, seed=2)})
    other_mask = found()
    assert differences(before, other_mask) == ("dataset d0: other files",)
    write(sources, {"002.png": image(seed=9)})
    assert differences(other_mask, found()) == ("dataset d0: other files",)


class NextAugmentation(Augmentation):
    sharpen: bool = False


class NextDataset(Dataset):
    """A possible later release: more settings, inside a section and at the top level."""

    augmentation: NextAugmentation = NextAugmentation()
    curriculum: str | None = None


def test_a_release_with_more_settings_takes_data_that_does_not_use_them_for_the_same(
    tmp_path: Path, folder: Path
) -> None:
    found = index_of(tmp_path, {"path": str(folder), "repeats": 1, "augmentation": {"flip_x": True}}).datasets[0]

    def later(**values: Any) -> Fingerprint:
        settings = {**found.dataset.model_dump(), **values}
        return fingerprint([replace(found, dataset=NextDataset.model_validate(settings))])

    assert differences(fingerprint([found]), later()) == ()
    assert differences(fingerprint([found]), later(curriculum="easy first")) == ("dataset d0: other settings",)
    assert differences(later(), later(augmentation={"flip_x": True, "sharpen": True})) == (
        "dataset d0: other settings",
    )


def test_datasets_that_come_and_go(tmp_path: Path, folder: Path) -> None:
    one = of(tmp_path, folder)
    two = index_of(tmp_path, {"path": str(folder)}, {"path": str(folder)}).fingerprint
    assert differences(one, two) == ("dataset d1 is new",)
    assert differences(two, one) == ("dataset d1 was removed",)
