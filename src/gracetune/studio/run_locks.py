"""Which runs have a living process. A run locks a file in its checkpoint folder for as long as it lives.

The studio must not take that lock, not even for a moment: a run that starts in that moment would be rejected. Linux
lists all locks in /proc/locks, which is only read.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from gracetune.checkpoint.folder import LOCK_FILE

_LOCKS = Path("/proc/locks")
_LINE = re.compile(r"(?:FLOCK|POSIX) +\S+ +WRITE +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ")
_SECONDS = 0.25
"""Age up to which the list of locks is used again: one reading serves a whole list of runs."""


class RunLocks:
    """The locked files of this machine, read again when they are older than `_SECONDS`."""

    def __init__(self, file: Path = _LOCKS) -> None:
        self._file = file
        self._read_at = float("-inf")
        self._holders: dict[int, list[tuple[int, int]]] = {}
        """Inode -> device and process id of each writer's lock."""

    def is_held(self, run: Path) -> bool:
        """Whether a process holds the run's lock."""
        return self.holder(run) is not None

    def holder(self, run: Path) -> int | None:
        """The id of the process that holds the run's lock."""
        file = f"{run}/checkpoints/{LOCK_FILE}"
        try:
            found = os.lstat(file)
        except OSError:
            return None
        self._refresh()
        for device, process in self._holders.get(found.st_ino, ()):
            # btrfs and overlay file systems show another device in /proc/locks than in `stat`.
            if device == found.st_dev or _has_open(process, Path(file)):
                return process
        return None

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < _SECONDS:
            return
        try:
            text = self._file.read_text()
        except OSError:  # not Linux, or no /proc
            text = ""
        holders: dict[int, list[tuple[int, int]]] = {}
        for process, major, minor, inode in _LINE.findall(text):
            device = os.makedev(int(major, 16), int(minor, 16))
            holders.setdefault(int(inode), []).append((device, int(process)))
        self._holders, self._read_at = holders, time.monotonic()


def _has_open(process: int, path: Path) -> bool:
    """Whether the process has this file open. False for processes of other users, whose files cannot be seen."""
    try:
        return any(one.readlink() == path for one in Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return False
