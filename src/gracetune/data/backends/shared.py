"""What every backend does the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from gracetune.data.backend import FileStat
from gracetune.data.backends.listing import Listing
from gracetune.data.backends.paths import refusal
from gracetune.data.errors import MissingFileError


class Storage(ABC):
    """The part of the contract that follows from the rest of it."""

    @abstractmethod
    def survey(self) -> Listing: ...

    @abstractmethod
    def stat(self, path: str) -> FileStat: ...

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
