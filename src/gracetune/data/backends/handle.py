"""Backend handles: plain data, sent as JSON, with which another process opens the same backend. Never a pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gracetune.data.backend import LeftOut
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.segment import SegmentHandle


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceHandle(_Message):
    """A folder or URL that any process can open itself."""

    kind: Literal["local", "url"]
    root: str
    """An absolute path for a folder, because the other process may have a different working directory."""


class StagedHandle(_Message):
    """Staged data of a running process. Valid for as long as that process keeps it open."""

    kind: Literal["in_memory"] = "in_memory"
    format: Literal[3] = 3
    pid: int
    started: int
    """The process's start time in clock ticks since boot. It identifies the process, because pids are reused."""
    root: str
    segments: tuple[SegmentHandle, ...]
    left_out: tuple[LeftOut, ...] = ()
    """Files that the source gave no access to when it was staged."""


BackendHandle: TypeAlias = SourceHandle | StagedHandle
_ADAPTER: TypeAdapter[BackendHandle] = TypeAdapter(Annotated[BackendHandle, Field(discriminator="kind")])


def to_json(handle: BackendHandle) -> str:
    return handle.model_dump_json()


def from_json(text: str) -> BackendHandle:
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise StagingError(
            f"the backend handle cannot be read: {error.errors()[0]['msg']}\n"
            "  try  run the same version of gracetune in all processes of a run"
        ) from error


def process_start(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 2 is the program's name in parentheses, which may itself contain spaces and parentheses. The start time is
    # field 22, so number 19 after it.
    return int(text.rpartition(")")[2].split()[19])


def own_start() -> int:
    """The start time of this process."""
    started = process_start(os.getpid())
    if started is None:
        raise StagingError("/proc is not mounted, and without it other processes cannot open staged data")
    return started
