"""What a backend found below its root: the files, and everything it left out with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gracetune.data.backend import Backend, FileStat


@dataclass(frozen=True)
class LeftOut:
    """A file that is there and not used."""

    path: str
    reason: str


@dataclass(frozen=True)
class Listing:
    files: Mapping[str, FileStat]
    """Sorted by path."""
    left_out: tuple[LeftOut, ...] = ()
    """What the storage does not hand out."""
    unselected: tuple[LeftOut, ...] = ()
    """What it would hand out, and a dataset did not ask for."""


@runtime_checkable
class Surveyor(Protocol):
    """A backend that lists and measures in one go, and says what it left out."""

    def survey(self) -> Listing: ...


def survey(backend: Backend) -> Listing:
    """The files of any backend; one `stat` for each where it has no quicker way."""
    if isinstance(backend, Surveyor):
        return backend.survey()
    return Listing({path: backend.stat(path) for path in backend.list()})
