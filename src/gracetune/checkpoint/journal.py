"""The journal of a run's folder: what the process that holds the lock has begun and not ended.

The first line of the lock file, JSON: {"saving": [30], "retiring": [10]}. The next process to take the lock ends it:

saving N     the weights of step N are written before checkpoint N is complete. Without that checkpoint they are removed
retiring N   checkpoint N is not kept any more, and the weights of step N go with it
sampling N   samples of step N are not all there; a run that goes on from step N draws them
finishing N  the final files are written, checked and reported after step N, the last one

The line is written in one call and is not flushed: it is for processes that are killed. A power cut may lose it; then
files that belong to no checkpoint stay.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

Work = Literal["saving", "retiring", "sampling", "finishing"]
_LONGEST = 1 << 16


class Journal:
    """Of the process that has the lock; safe for several threads."""

    def __init__(self, lock_file: int, *, is_fresh: bool) -> None:
        """`lock_file` is its open descriptor, which stays the caller's. `is_fresh` where the disk has no locks: the
        line may be of a process that is at work, so nothing is read."""
        self._descriptor = lock_file
        self._mutex = threading.Lock()
        self._steps = _parse(b"" if is_fresh else os.pread(lock_file, _LONGEST, 0))

    def steps(self, work: Work) -> tuple[int, ...]:
        with self._mutex:
            return tuple(sorted(self._steps[work]))

    def begin(self, work: Work, step: int) -> None:
        with self._mutex:
            self._steps[work].add(step)
            self._write()

    def end(self, work: Work, *steps: int) -> None:
        with self._mutex:
            if not self._steps[work].isdisjoint(steps):
                self._steps[work].difference_update(steps)
                self._write()

    def _write(self) -> None:
        found = {work: sorted(steps) for work, steps in self._steps.items() if steps}
        line = f"{json.dumps(found)}\n".encode() if found else b"\n"
        with suppress(OSError):  # of a full disk, say: without the line some files stay, and that is all
            os.pwrite(self._descriptor, line, 0)
            os.ftruncate(self._descriptor, len(line))


def read_journal(lock_file: Path) -> Mapping[Work, set[int]]:
    """For whoever only wants to look; of a process that is at work, it may be old in a moment."""
    try:
        with lock_file.open("rb") as file:
            return _parse(file.read(_LONGEST))
    except OSError:  # there is none; or whoever takes the lock finds out what is wrong
        return _parse(b"")


def _parse(text: bytes) -> dict[Work, set[int]]:
    """Nothing where the line was torn."""
    try:
        found = json.loads(text.partition(b"\n")[0] or b"{}")
    except ValueError:
        found = {}
    return {work: _whole_numbers(found, work) for work in get_args(Work)}


def _whole_numbers(found: object, work: Work) -> set[int]:
    steps = found.get(work) if isinstance(found, dict) else None
    return {step for step in steps if type(step) is int} if isinstance(steps, Iterable) else set()
