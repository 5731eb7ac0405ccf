"""Facts about datasets: counted if the folder is visible here, stated as assumptions if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.models.footprint import SampleShape
from gracetune.models.registry import FOOTPRINTS
from gracetune.planning.dataset_facts import DatasetFacts, largest_sample, survey
from gracetune.units import MIB

WAN = FOOTPRINTS["wan"][0]


def config(*datasets: dict[str, Any]) -> RunConfig:
    model = {"family": "wan"}
    return RunConfig.model_validate(
        {"name": "run", "output_dir": "out", "model": model, "datasets": list(datasets), "training": {"max_steps": 1}}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {
        "a.jpg": 100, "b.PNG": 200, "deep/er/c.webp": 300, "a.txt": 9999, "clip.mp4": 1000, "song.flac": 70,
    }.items():  # fmt: skip
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    (tmp_path / "data" / "dangling.jpg").symlink_to(tmp_path / "gone.jpg")
    return tmp_path / "data"


class TestSurvey:
    @pytest.mark.parametrize(("kind", "count", "size"), [("image", 3, 600), ("video", 1, 1000), ("audio", 1, 70)])
    def test_counts_files_of_its_kind_at_any_depth(self, folder: Path, kind: str, count: int, size: int) -> None:
        found = survey(config({"id": "d", "path": str(folder), "dataset_type": kind}))
        assert found == (DatasetFacts("d", count, size),)

    def test_max_samples_is_a_limit(self, folder: Path) -> None:
        found = survey(config({"id": "d", "path": str(folder), "max_samples": 2}))
        assert found == (DatasetFacts("d", 2, 400),)

    def test_extensions_of_a_staged_dataset(self, folder: Path) -> None:
        dataset = {
            "id": "d",
            "path": str(folder),
            "type": "in_memory",
            "in_memory": {"file_extensions": [".PNG", "webp"]},
        }
        assert survey(config(dataset)) == (DatasetFacts("d", 2, 500),)

    def test_an_empty_folder_is_reported(self, tmp_path: Path) -> None:
        (found,) = survey(config({"id": "d", "path": str(tmp_path)}))
        assert found.samples == found.file_bytes == 0
        assert found.assumed is not None

    def test_disabled_datasets_are_ignored(self, folder: Path) -> None:
        datasets = [{"id": "d", "path": str(folder)}, {"id": "off", "path": str(folder), "disabled": True}]
        assert [fact.id for fact in survey(config(*datasets))] == ["d"]

    def test_without_a_folder_the_number_is_the_users_or_a_reported_guess(self) -> None:
        away = {"id": "d", "path": "/not/here", "type": "in_memory"}
        (guessed,), (message,) = survey(config(away)), survey(config(away), samples=7, option="--samples")
        assert guessed.samples == 1000
        assert "(a guess)" in str(guessed.assumed), "a run has no option for it"
        (asking,) = survey(config(away), option="--samples")
        assert "(a guess; say --samples N)" in str(asking.assumed)
        assert message == DatasetFacts("d", 7, 14 * MIB, message.assumed)
        assert "--samples" in str(message.assumed)
        (limited,) = survey(config({**away, "max_samples": 5}), samples=7)
        assert limited.samples == 5
        assert "max_samples" in str(limited.assumed)


def shape(**options: Any) -> SampleShape:
    return largest_sample(Dataset.model_validate({"id": "d", "path": "p", **options}), WAN).shape


class TestLargestSample:
    def test_the_same_image_in_three_notations(self) -> None:
        square = {"enabled": True, "aspect": "square"}
        assert shape(resolution=1024) == SampleShape(1024, 1024)
        assert shape(resolution=1.048576, resolution_type="area") == SampleShape(1024, 1024)
        assert shape(resolution=1024, resolution_type="pixel", crop=square) == SampleShape(1024, 1024)

    def test_sides_are_multiples_of_a_token(self) -> None:
        assert shape(resolution=500).width % 16 == 0
        assert shape(resolution=1) == SampleShape(16, 16)

    def test_a_fixed_short_side_lets_the_other_grow(self) -> None:
        wide = largest_sample(Dataset(id="d", path="p", resolution=512, resolution_type="pixel"), WAN)
        assert wide.shape.pixels == pytest.approx(512 * 910, rel=0.03)
        assert "16:9" in str(wide.assumed)
        limited = shape(resolution=512, resolution_type="pixel", minimum_aspect_ratio=0.5)
        assert limited.pixels == pytest.approx(512 * 1024, rel=0.03)
        cropped = {"enabled": True, "aspect": "closest", "aspect_buckets": [1.0, 3.0]}
        assert shape(resolution=512, resolution_type="pixel", crop=cropped).pixels == pytest.approx(
            512 * 1536, rel=0.03
        )

    def test_frames(self) -> None:
        assert shape(dataset_type="video", video={"num_frames": 33}).frames == 33
        assert shape(dataset_type="video").frames == 81
        assert shape(dataset_type="image", video={"num_frames": 33}).frames == 1
        assert shape(dataset_type="video", video={"from_length": True, "max_frames": 49}).frames == 49

    def test_audio(self) -> None:
        audio = FOOTPRINTS["stable_audio"][0]
        dataset = Dataset.model_validate({"id": "d", "path": "p", "dataset_type": "audio"})
        assert largest_sample(dataset, audio).shape.seconds == pytest.approx(47.55, abs=0.01)
        short = Dataset.model_validate(
            {"id": "d", "path": "p", "dataset_type": "audio", "audio": {"max_duration_seconds": 12.0}}
        )
        assert largest_sample(short, audio).shape.seconds == 12
