"""What one process tells another so that it can open the same backend: plain data, JSON on the wire, never a pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gracetune.data.backends.listing import LeftOut
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.segment import SegmentHandle


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceHandle(_Message):
    """A folder or URL that anybody can open afresh."""

    kind: Literal["local", "url"]
    root: str
    """Absolute for a folder: the other process may have another working directory."""


class StagedHandle(_Message):
    """Staged data of a running process. Good for as long as that process keeps it open."""

    kind: Literal["in_memory"] = "in_memory"
    format: Literal[3] = 3
    pid: int
    started: int
    """Clock ticks after boot: a pid alone may belong to somebody else by now."""
    root: str
    segments: tuple[SegmentHandle, ...]
    left_out: tuple[LeftOut, ...] = ()
    """What the source did not hand out when it was staged."""


BackendHandle: TypeAlias = SourceHandle | StagedHandle
_ADAPTER: TypeAdapter[BackendHandle] = TypeAdapter(Annotated[BackendHandle, Field(discriminator="kind")])


def to_json(handle: BackendHandle) -> str:
    return handle.model_dump_json()


def from_json(text: str) -> BackendHandle:
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise StagingError(
            f"this is no handle of a backend that we understand: {error.errors()[0]['msg']}\n"
            "  try  run the same gracetune in all processes of a run"
        ) from error


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks after boot; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may contain anything, parentheses too.
    return int(text.rpartition(")")[2].split()[19])


def own_start() -> int:
    started = process_start(os.getpid())
    if started is None:
        raise StagingError("/proc is not mounted, and without it no other process can reach staged data")
    return started
