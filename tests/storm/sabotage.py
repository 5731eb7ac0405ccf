"""Ways to break gracetune, each called by a process before its command: a storm has to notice every one of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_in_place() -> None:
    """Adapter files appear under their names before they are complete."""
    from gracetune.storage import safetensors_files

    def write_file(path: Path, data: Iterable[bytes | memoryview], **_: Any) -> None:
        with path.open("wb", buffering=0) as file:
            for chunk in data:
                file.write(chunk)

    vars(safetensors_files)["write_file"] = write_file


def keep_leftovers() -> None:
    """A start neither removes what a killed process left nor ends what it began."""
    from gracetune.checkpoint.store import CheckpointStore
    from gracetune.train import preflight

    vars(preflight)["remove_leftovers"] = lambda *_: []
    CheckpointStore._end_retirement = lambda *_: ()  # type: ignore[method-assign]


def forget_optimizer() -> None:
    """A resumed run begins with a new optimizer's averages."""
    from gracetune.train import state_parts as chunks

    vars(chunks)["load_named_state"] = lambda *_: None
