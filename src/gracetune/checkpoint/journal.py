"""The journal of a checkpoint folder: operations that the process holding the lock has started but not finished.

The journal is the first line of the lock file, in JSON: {"saving": [30], "retiring": [10]}. The next process that takes
the lock completes or reverts these operations:

saving N     The weights of step N are written before checkpoint N is complete. If the checkpoint is missing, the
             weights are removed.
retiring N   Checkpoint N is no longer kept. It is removed together with the weights of step N.
sampling N   Not all validation samples of step N exist. A run that resumes from step N generates them.
finishing N  The final files, checks and report after the last step N are incomplete.

The line is written with one system call and not synced, which suffices for processes that are killed. A power failure
may lose it; then files that belong to no checkpoint are left behind.
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
    """The journal of the process that holds the lock. Thread-safe."""

    def __init__(self, lock_file: int, *, is_fresh: bool) -> None:
        """`lock_file` is an open descriptor; the caller closes it.

        Pass `is_fresh` on a file system without locks. An existing line may then belong to a process that is still
        running, so it is not read.
        """
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
        with suppress(OSError):  # e.g. a full disk; the only consequence is that some files may be left behind
            os.pwrite(self._descriptor, line, 0)
            os.ftruncate(self._descriptor, len(line))


def read_journal(lock_file: Path) -> Mapping[Work, set[int]]:
    """Read a journal without taking the lock. If its process is running, the result may be outdated."""
    try:
        with lock_file.open("rb") as file:
            return _parse(file.read(_LONGEST))
    except OSError:  # the file does not exist; other problems are reported when the lock is taken
        return _parse(b"")


def _parse(text: bytes) -> dict[Work, set[int]]:
    """Parse the first line. An incomplete line counts as empty."""
    try:
        found = json.loads(text.partition(b"\n")[0] or b"{}")
    except ValueError:
        found = {}
    return {work: _whole_numbers(found, work) for work in get_args(Work)}


def _whole_numbers(found: object, work: Work) -> set[int]:
    steps = found.get(work) if isinstance(found, dict) else None
    return {step for step in steps if type(step) is int} if isinstance(steps, Iterable) else set()
