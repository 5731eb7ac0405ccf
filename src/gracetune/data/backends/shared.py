"""The base class of all backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import BinaryIO, Self

from gracetune.data.backend import FileStat, Listing
from gracetune.data.backends.handle import BackendHandle
from gracetune.data.backends.paths import rejection
from gracetune.data.errors import MissingFileError
from gracetune.hostmem.errors import StagingError


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


def why_unlisted(path: str) -> str | None:
    """Why an existing file is left out of the listing; None if it is not."""
    reason = rejection(path)
    return None if reason is None else f"it cannot be used: {reason}"
