"""What every backend does the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import BinaryIO, Self

from gracetune.data.backend import FileStat
from gracetune.data.backends.handle import BackendHandle
from gracetune.data.backends.listing import Listing
from gracetune.data.backends.paths import refusal
from gracetune.data.errors import MissingFileError
from gracetune.hostmem.errors import StagingError


class Storage(ABC):
    """What every backend is made from: the contract of `gracetune.data.backend.Backend`, and an end."""

    @property
    @abstractmethod
    def root(self) -> str:
        """The dataset's folder or URL as it was given."""

    @abstractmethod
    def survey(self) -> Listing:
        """`list` and `stat` of everything at once, and what was left out and why."""

    @abstractmethod
    def stat(self, path: str) -> FileStat:
        """MissingFileError where there is no such file."""

    @abstractmethod
    def read(self, path: str) -> memoryview:
        """The whole file. MissingFileError, or UnreadableMediaError with the reason."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A seekable stream of the file."""

    def handle(self) -> BackendHandle:
        """Plain data from which `attach_backend` opens the same in another process of this machine."""
        raise StagingError(f"{self.root}: another process cannot open what a {type(self).__name__} reads")

    def list(self) -> tuple[str, ...]:
        return tuple(self.survey().files)

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except MissingFileError:
            return False
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to do here
        """Nothing is held between calls, unless a backend says otherwise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def why_unlisted(path: str) -> str | None:
    """Why a file that is there is not handed out; None where it is."""
    reason = refusal(path)
    return None if reason is None else f"it cannot be used: {reason}"
