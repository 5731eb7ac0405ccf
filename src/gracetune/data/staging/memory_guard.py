"""Memory limits of staging: checked with an estimate before staging, and again while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from gracetune.data.backends.errors import MemoryLimitError, problem_text
from gracetune.data.staging.estimate import Estimate, decimal
from gracetune.units import MIB, format_bytes

ASK_EVERY: Final = 128 * MIB
"""Free main memory is measured again each time this many bytes have been staged."""


class StagingMemoryGuard:
    """Checks staged bytes against the dataset's limit, the control group and main memory. Thread-safe.

    `headroom` returns the bytes this process can still allocate (None if unknown). `reserve` bytes of it stay free.
    """

    def __init__(
        self,
        dataset: str,
        *,
        limit: int | None,
        headroom: Callable[[], int | None],
        reserve: int,
        ask_every: int = ASK_EVERY,
    ) -> None:
        self._dataset = dataset
        self._limit, self._headroom, self._reserve = limit, headroom, reserve
        self._used, self._measured_at, self._measure_every = 0, 0, ask_every
        self._lock = threading.Lock()

    def check(self, estimate: Estimate) -> str | None:
        """Raise MemoryLimitError if the estimate does not fit. Returns a note if something could not be checked."""
        wanted = self._used + estimate.stored
        if self._limit is not None and wanted > self._limit:
            raise MemoryLimitError(self._over_limit(f"about {decimal(wanted)} to stage: {estimate}", wanted))
        left = self._headroom()
        if left is None:
            return "main memory: the free amount is unknown, so only memory_limit_gb was checked"
        if estimate.stored > left - self._reserve:
            raise MemoryLimitError(self._over_headroom(f"about {decimal(estimate.stored)} to stage: {estimate}", left))
        return None

    def take(self, count: int) -> None:
        """Count bytes before they are written. Raises MemoryLimitError if they do not fit."""
        with self._lock:
            self._used += count
            used = self._used
            measure = used - self._measured_at >= self._measure_every
            if measure:
                self._measured_at = used
        if self._limit is not None and used > self._limit:
            raise MemoryLimitError(self._over_limit(f"{decimal(used)} staged, with more to come", used))
        left = self._headroom() if measure else None
        if left is not None and left < self._reserve:
            raise MemoryLimitError(self._over_headroom(f"{decimal(used)} staged, with more to come", left))

    def give_back(self, count: int) -> None:
        with self._lock:
            self._used -= count

    @property
    def used(self) -> int:
        return self._used

    def _over_limit(self, found: str, wanted: int) -> str:
        enough = -(-wanted // 10**9)
        return problem_text(
            f"dataset {self._dataset}: in_memory.memory_limit_gb",
            found=found,
            expected=f"at most {decimal(self._limit or 0)}",
            hint=f"memory_limit_gb: {enough} or more, fewer file_extensions, compression: zstd, or type: local",
        )

    def _over_headroom(self, found: str, left: int) -> str:
        usable = max(0, left - self._reserve)
        return problem_text(
            f"dataset {self._dataset}: main memory",
            found=found,
            expected=f"at most {decimal(usable)}: {format_bytes(left)} is free in main memory and the control group, "
            f"minus a reserve of {format_bytes(self._reserve)}",
            hint="type: local, compression: zstd, fewer file_extensions, or more memory for the container",
        )
