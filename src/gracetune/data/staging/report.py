"""The progress and the result of staging a dataset, for the terminal and for the report of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gracetune.data.backend import LeftOut
from gracetune.data.staging.file_selection import reasons
from gracetune.data.staging.memory import StagingEstimate
from gracetune.data.text_format import counted
from gracetune.hostmem.hint import Hint
from gracetune.units import format_bytes, format_duration


@dataclass(frozen=True)
class StagingProgress:
    files: int
    """Files that are staged, or were found to be unreadable."""
    files_total: int
    read: int
    """Bytes read from the source so far."""
    total: int
    """Bytes to read in all."""
    stored: int
    """Bytes of memory used so far."""
    seconds: float
    """Since staging began."""

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


@dataclass(frozen=True)
class StagingReport:
    dataset: str
    files: int
    """Files that were staged, without unreadable ones."""
    raw: int
    """Bytes of these files at their source."""
    stored: int
    """Bytes of memory that they take."""
    compression: str
    compressed_files: int
    """The other files did not shrink enough. They are stored uncompressed and can be read without a copy."""
    threads: int
    seconds: float
    estimate: StagingEstimate
    unreadable: tuple[LeftOut, ...]
    """Files that could not be read. Reading them from the staged data raises the reason."""
    left_out: tuple[LeftOut, ...]
    """Files that the storage gave no access to."""
    unselected: tuple[LeftOut, ...]
    """Files that the dataset does not need."""
    numa: Hint
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes of the source per second."""
        return self.raw / self.seconds if self.seconds > 0 else 0.0

    def lines(self) -> list[str]:
        """Text for a terminal: the result in one line, then details and notes."""
        shrank = counted(self.compressed_files, "file")
        kept = f" as {format_bytes(self.stored)} ({self.compression}, {shrank} shrank)"
        staged = f"{counted(self.files, 'file')}, {format_bytes(self.raw)}{kept if self.compression != 'none' else ''}"
        threads = counted(self.threads, "thread")
        estimated = [f"estimated beforehand: {self.estimate}"] if self.compression != "none" else []
        lines = [
            f"{self.dataset}: {staged} staged in {format_duration(self.seconds)} "
            f"({self.rate / 1e9:.2f} GB/s, {threads})",
            f"memory: {self.numa.reason}",
            *estimated,
            *self.notes,
        ]
        lines += [f"unreadable: {item.path}: {item.reason}" for item in self.unreadable]
        others = reasons((*self.left_out, *self.unselected))
        lines += [f"left out, {counted(count, 'file')}: {reason}" for reason, count in others]
        return lines
