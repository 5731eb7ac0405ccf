"""The interface between the checkpoint store and the other processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Ranks(Protocol):
    """The processes of a run."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes]:
        """The values of all ranks, in rank order. All ranks call this; only rank 0 uses the result."""


@dataclass(frozen=True)
class OneProcess:
    """A run with a single process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]
