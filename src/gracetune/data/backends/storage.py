"""The base class of all backends, and their handles.

Another process opens the same backend with a handle. A handle is sent as JSON instead of a pickle, so that reading one
executes no code.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gracetune.data.backend import FileStat, LeftOut, Listing
from gracetune.data.backends.paths import rejection
from gracetune.data.errors import MissingFileError
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.segment import SegmentHandle


class Storage(ABC):
    """The base class of backends: the interface `gracetune.data.backend.Backend`, and `close`."""

    @property
    @abstractmethod
    def root(self) -> str:
        """The dataset's folder or URL as the user wrote it."""

    @abstractmethod
    def survey(self) -> Listing:
        """List all files with their size and time, and everything that is left out with the reason."""

    @abstractmethod
    def stat(self, path: str) -> FileStat:
        """Size and time of a file. Raises MissingFileError."""

    @abstractmethod
    def read(self, path: str) -> memoryview:
        """Read the whole file. Raises MissingFileError, or UnreadableMediaError with the reason."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open the file as a seekable stream."""

    def handle(self) -> BackendHandle:
        """A handle with which `attach_backend` opens the same data in another process of this machine."""
        raise StagingError(f"{self.root}: a {type(self).__name__} cannot be opened by another process")

    def list(self) -> tuple[str, ...]:
        return tuple(self.survey().files)

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except MissingFileError:
            return False
        return True

    def close(self) -> None:  # noqa: B027 - optional: most backends hold nothing between calls
        """Release what the backend holds between calls. The default does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def unlisted_reason(path: str) -> str | None:
    """Why an existing file is left out of the listing; None if it is not."""
    reason = rejection(path)
    return None if reason is None else f"it cannot be used: {reason}"


class _HandleModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceHandle(_HandleModel):
    """A folder or URL that any process can open itself."""

    kind: Literal["local", "url"]
    root: str
    """An absolute path for a folder, because the other process may have a different working directory."""


class StagedHandle(_HandleModel):
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


def process_start_time(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 2 is the program's name in parentheses, which may itself contain spaces and parentheses. The start time is
    # field 22, so number 19 after it.
    return int(text.rpartition(")")[2].split()[19])


def own_start_time() -> int:
    """The start time of this process."""
    started = process_start_time(os.getpid())
    if started is None:
        raise StagingError("/proc is not mounted, and without it other processes cannot open staged data")
    return started
