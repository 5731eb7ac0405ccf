"""The result of staging a dataset, for the terminal and for the run's report."""

from __future__ import annotations

from dataclasses import dataclass

from gracetune.data.backends.listing import LeftOut
from gracetune.data.staging.file_selection import reasons
from gracetune.data.staging.memory import Estimate
from gracetune.data.text_format import counted
from gracetune.hostmem.hint import Hint
from gracetune.units import format_bytes, format_duration


@dataclass(frozen=True)
class StagingReport:
    dataset: str
    files: int
    raw: int
    stored: int
    compression: str
    compressed_files: int
    """The other files did not shrink enough. They are stored uncompressed and can be read without a copy."""
    threads: int
    seconds: float
    estimate: Estimate
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
