"""The progress of staging, as a value with a one-line text form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gracetune.units import format_duration


@dataclass(frozen=True)
class StagingProgress:
    files: int
    files_total: int
    read: int
    """Bytes read from the source so far."""
    total: int
    """Bytes to read in all."""
    stored: int
    """Bytes of memory used so far."""
    seconds: float

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before anything was read."""
        return self.read / self.seconds if self.read and self.seconds > 0 else None

    @property
    def remaining_seconds(self) -> float | None:
        if self.files == self.files_total:
            return 0.0
        return None if self.rate is None else max(0, self.total - self.read) / self.rate

    def __str__(self) -> str:
        rate = "-" if self.rate is None else f"{self.rate / 1e9:.2f}"
        left = self.remaining_seconds
        ending = "unknown" if left is None else format_duration(left)
        return (
            f"{self.files}/{self.files_total} files  {self.read / 1e9:.2f}/{self.total / 1e9:.2f} GB  "
            f"{rate} GB/s  ETA {ending}"
        )


OnProgress: TypeAlias = Callable[[StagingProgress], None]


def unwatched(progress: StagingProgress) -> None:
    """Ignore progress."""
