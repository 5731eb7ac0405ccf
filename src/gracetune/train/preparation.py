"""The time until a run trains, by part. The event `RunStarted` has it, and the report shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import psutil

IMPORTS: Final = "starting Python, imports"
OTHER: Final = "everything else"


class PreparationTimes:
    """Seconds of each part, in order. Time outside all parts counts as `OTHER`. Parts are not nested."""

    def __init__(self, imports_s: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`imports_s`: seconds since the process started; None if this is not the first thing it does."""
        self._clock = clock
        self._began = clock() - (imports_s or 0.0)
        self._parts = {} if imports_s is None else {IMPORTS: imports_s}

    @classmethod
    def of_this_process(cls) -> PreparationTimes:
        return cls(max(0.0, time.time() - psutil.Process().create_time()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self._clock()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + self._clock() - began

    def seconds(self) -> dict[str, float]:
        """All parts until now, `OTHER` last. Their sum is the time since the beginning."""
        rest = self._clock() - self._began - sum(self._parts.values())
        return {**self._parts, OTHER: max(0.0, rest)}
