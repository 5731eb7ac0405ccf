"""The interface of storage backends: read-only access to the files of a local folder, of memory or of a URL.

Paths are relative to the dataset's root and use forward slashes, whatever form the root has. A backend never gives
access to anything outside the root.

A `Listing` has the files below the root, and everything left out with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable


@dataclass(frozen=True)
class FileStat:
    size: int
    modified_ns: int
    """0 if the storage does not report it."""


class Backend(Protocol):
    """The files of one dataset. All methods may be called from several threads at once."""

    @property
    def root(self) -> str:
        """The dataset's folder or URL as the user wrote it."""
        ...

    def list(self) -> Iterable[str]:
        """Every file below the root, sorted."""
        ...

    def stat(self, path: str) -> FileStat: ...

    def read(self, path: str) -> memoryview:
        """Read the whole file, without a copy if the backend can. Raises MissingFileError."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open the file as a seekable stream."""
        ...

    def exists(self, path: str) -> bool: ...


@dataclass(frozen=True)
class LeftOut:
    """A file that exists but is not used, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Listing:
    files: Mapping[str, FileStat]
    """Sorted by path."""
    left_out: tuple[LeftOut, ...] = ()
    """Files that the storage gives no access to."""
    unselected: tuple[LeftOut, ...] = ()
    """Files that are accessible, but that the dataset does not need."""


@runtime_checkable
class Surveyor(Protocol):
    """A backend that lists and measures all files at once, and reports what it left out."""

    def survey(self) -> Listing: ...


def survey(backend: Backend) -> Listing:
    """The listing of any backend, with one `stat` per file if the backend has no faster way."""
    if isinstance(backend, Surveyor):
        return backend.survey()
    return Listing({path: backend.stat(path) for path in backend.list()})
