"""Small remote datasets, and configs for them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gracetune.config import Environment
from gracetune.config.run_config import RunConfig
from gracetune.data.copies.local import Copies
from gracetune.data.geometry import Geometry
from gracetune.data.index_builder import build_index
from gracetune.hub.access import HubAccess
from gracetune.storage.transfer import RetryPolicy

QUICK = RetryPolicy(attempts=3, first_pause=0.01)
GEOMETRY = Geometry("image", side_multiple=32)
FROM_COLUMNS = {"path": "metadata.jsonl", "filename_column": "file_name"}


def encoded_image(number: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """Each is different."""
    buffer = io.BytesIO()
    image = Image.new("RGB", size, (number * 37 % 256, number * 91 % 256, number * 13 % 256))
    image.putpixel((0, 0), (number % 256, number // 256, 7))
    image.save(buffer, "PNG")
    return buffer.getvalue()


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    tables.write_table(arrow.Table.from_pylist([dict(row) for row in rows]), buffer, row_group_size=4)
    return buffer.getvalue()


def rows(count: int, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    """An image as the `datasets` library stores it: its bytes and its name."""
    return [
        {"image": {"bytes": encoded_image(number), "path": f"{number}.png"}, "text": f"caption {number}", **more}
        for number in range(first, first + count)
    ]


def tar(members: Mapping[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def shard(count: int, first: int = 0) -> dict[str, bytes]:
    """Members named as in WebDataset."""
    members: dict[str, bytes] = {}
    for number in range(first, first + count):
        members[f"{number:06d}.png"] = encoded_image(number)
        members[f"{number:06d}.txt"] = f"text {number}".encode()
        members[f"{number:06d}.json"] = json.dumps({"prompt": f"prompt {number}", "score": number}).encode()
    return members


def config(folder: Path, *datasets: Mapping[str, Any]) -> RunConfig:
    given = [{"id": f"d{number}", "resolution": 64.0, **dataset} for number, dataset in enumerate(datasets)]
    return RunConfig.model_validate({
        "name": "x", "output_dir": str(folder / "out"), "model": {"family": "sdxl"}, "datasets": given,
        "training": {"max_steps": 1},
    })  # fmt: skip


def copies(run: RunConfig) -> Copies:
    """With the current environment."""
    return Copies(run, HubAccess.of(Environment.capture()))


def captions(run: RunConfig) -> dict[str, dict[str, tuple[str, ...]]]:
    """For every file of every dataset, as a run would train on it."""
    index = build_index(run, GEOMETRY)
    return {one.id: {item.path: item.captions for item in one.items} for one in index.datasets}


def fetched(run: RunConfig) -> dict[str, dict[str, tuple[str, ...]]]:
    """Make the copy and read it as a run does."""
    found = copies(run)
    found.make(retry_policy=QUICK)
    return captions(found.localized())
