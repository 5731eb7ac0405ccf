"""File locks that end with their process.

The kernel releases a file lock when its process ends, however it ends. Nothing here relies on process ids, start times
or clocks: they can be reused, wrong, or those of another machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Literal

LockResult = Literal["held", "busy", "unsupported"]
"""`busy`: another process, or another open descriptor, has the lock. `unsupported`: the file system has no locks."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks: some network file systems are mounted that way."""
_TAKEN = (errno.EACCES, errno.EAGAIN)
"""POSIX allows either for a byte that another process has locked."""


def open_lock_file(path: Path) -> int:
    """Open the lock file, creating it if needed. Closing the descriptor releases its locks."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def lock(descriptor: int, *, exclusive: bool, wait: bool = False) -> LockResult:
    """Lock the whole file with `flock`. The lock belongs to this open descriptor, so it also excludes other threads."""
    mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, mode if wait else mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return "unsupported"
        raise
    return "held"


def lock_byte(descriptor: int, offset: int) -> LockResult:
    """Lock one byte of the file with `lockf`. It belongs to the process: threads do not exclude each other."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except OSError as error:
        if error.errno in _TAKEN:
            return "busy"
        if error.errno in _NO_LOCKS:
            return "unsupported"
        raise
    return "held"


def unlock_byte(descriptor: int, offset: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, offset)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
