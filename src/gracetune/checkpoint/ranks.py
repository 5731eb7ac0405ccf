"""What the store has to know of the run's other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank gave, in the order of the ranks. Called by all; only rank 0 uses the answer."""


@dataclass(frozen=True)
class OneProcess:
    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]
