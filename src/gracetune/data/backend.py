"""The interface of storage backends: read-only access to the files of a local folder, of memory or of a URL.

Paths are relative to the dataset's root and use forward slashes, whatever form the root has. A backend never gives
access to anything outside the root.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Protocol


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
