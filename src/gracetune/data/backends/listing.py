"""Directory listings of backends: the files below the root, and everything left out with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gracetune.data.backend import Backend, FileStat


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
