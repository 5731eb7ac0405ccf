"""Small datasets on disk, and the indexes made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.data.geometry import Geometry
from gracetune.data.index import DataIndex
from gracetune.data.index_builder import build_index
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.media.probe import ImageFacts
from gracetune.data.media_files import MediaFile
from gracetune.data.refs import Bucket
from unit.data.media.generated import generated_image, image_bytes

SQUARES = Geometry("image", side_multiple=16)
SIZES = ((64, 64), (96, 64), (64, 96), (128, 64))


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def image(width: int = 64, height: int = 64, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    return image_bytes(generated_image(width, height, seed), kind, **options)


def images(count: int, *, captions: bool = True) -> dict[str, bytes | str]:
    """Different images of four shapes, each with a caption."""
    files: dict[str, bytes | str] = {}
    for number in range(count):
        files[f"{number:03}.png"] = image(*SIZES[number % len(SIZES)], seed=number)
        if captions:
            files[f"{number:03}.txt"] = f"picture {number}"
    return files


def config(tmp_path: Path, *datasets: dict[str, Any], seed: int = 7, **values: Any) -> RunConfig:
    defaults = {"resolution": 64.0}
    return RunConfig.model_validate(
        {
            "name": "test",
            "output_dir": str(tmp_path / "out"),
            "model": {"family": "sdxl"},
            "training": {"max_steps": 10, "seed": seed, "batch_size": 2},
            "datasets": [{"id": f"d{n}", **defaults, **values} for n, values in enumerate(datasets)],
            **values,
        }
    )


def index_of(
    tmp_path: Path, *datasets: dict[str, Any], geometry: Geometry = SQUARES, seed: int = 7, **options: Any
) -> DataIndex:
    return build_index(config(tmp_path, *datasets, seed=seed), geometry, **options)


def made_up(*datasets: dict[str, Any], seed: int = 7) -> DataIndex:
    """An index of files that do not exist: `counts` gives the samples of each of some buckets."""
    indexes = []
    for position, values in enumerate(datasets):
        counts = values["counts"]
        settings = {name: value for name, value in values.items() if name != "counts"}
        dataset = Dataset.model_validate({"id": f"d{position}", "path": "nowhere", **settings})
        items = [
            made_up_item(position, bucket, number, dataset)
            for bucket, count in zip((Bucket(64, 64), Bucket(96, 64), Bucket(64, 96)), counts, strict=False)
            for number in range(count)
        ]
        indexes.append(DatasetIndex(position, dataset, tuple(items)))
    return DataIndex(seed, SQUARES, tuple(indexes), (), {})


def made_up_item(position: int, bucket: Bucket, number: int, dataset: Dataset) -> Item:
    name = f"{position}-{bucket.width}x{bucket.height}-{number}"
    file = MediaFile(f"{name}.png", 100, f"{name:x>32}", ImageFacts(bucket.width, bucket.height, False))
    return Item(file, bucket, 1 + dataset.repeats, (f"caption of {name}",), "own")
