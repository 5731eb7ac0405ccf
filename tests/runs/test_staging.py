"""A folder that several datasets name is staged once in a whole run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gracetune.data.backends import in_memory
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, images, run
from unit.data.backends.helpers import held


class Staged(CollectingView):
    """Counts how often each dataset was staged."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, int] = {}

    def on_staging(self, name: str) -> Any:
        return lambda progress: self.files.update({name: progress.files})


def test_two_datasets_of_one_folder_are_staged_once(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    close = in_memory.InMemoryBackend.close

    def closed(backend: in_memory.InMemoryBackend) -> None:
        copies.append(backend.stored)
        close(backend)

    monkeypatch.setattr(in_memory.InMemoryBackend, "close", closed)
    folder = images(tmp_path / "data")
    size = sum(file.stat().st_size for file in folder.iterdir())
    # Room for one copy, and not for two.
    staged = {"type": "in_memory", "path": str(folder), "in_memory": {"memory_limit_gb": 1.5 * size / 1e9}}
    datasets = [{**staged, "id": "small", "resolution": 64.0}, {**staged, "id": "large", "resolution": 96.0}]
    config = config_for("sdxl", tiny_model, tmp_path, datasets=datasets, training={"max_steps": 4})
    view = Staged()
    assert run(config, view).step == 4
    assert view.files == {"small": 8}
    assert [line for line in view.lines if "share" in line] == [
        f"datasets small, large share {folder}: it is staged once; memory_limit_gb {1.5 * size / 1e9:g}, the smallest "
        "of them, applies to all"
    ]
    assert [line for line in view.lines if re.match(r"small: 8 files, .* staged in", line)]
    assert len(copies) == 1
    assert copies[0] < 2 * size + 2**20
    assert held() == (0, 0)
