"""Where bytes come from: one small contract for local folders, memory and URLs. A dataset is read and never changed.

Paths are relative to the dataset's root, with forward slashes, whatever the root looks like (absolute, relative,
symlinked, unicode). Nothing outside the root can be reached through a backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class FileStat:
    size: int
    modified_ns: int
    """0 where the storage does not say."""


class Backend(Protocol):
    """Safe to use from several threads at once."""

    @property
    def root(self) -> str:
        """The dataset's folder or URL as it was given."""
        ...

    def list(self) -> Iterable[str]:
        """Every file below the root, sorted."""
        ...

    def stat(self, path: str) -> FileStat: ...

    def read(self, path: str) -> memoryview:
        """The whole file; without a copy where the backend can. Raises MissingFileError."""
        ...

    def open(self, path: str) -> BinaryIO:
        """A seekable stream of the file."""
        ...

    def exists(self, path: str) -> bool: ...
