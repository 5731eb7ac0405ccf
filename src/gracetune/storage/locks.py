"""Locks that end with their process.

Everything here rests on the kernel's file locks: the kernel releases them when their process ends, however it ends.
Process ids, start times and clocks, which can be reused, be of another machine or be wrong, take no part.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Literal

Grip = Literal["held", "busy", "unsupported"]

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Some network file systems are mounted without locks."""
_TAKEN = (errno.EACCES, errno.EAGAIN)


def open_lock_file(path: Path) -> int:
    """A descriptor of the file, which is made where there is none. Closing it releases its locks."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def lock(descriptor: int, *, exclusive: bool, wait: bool = False) -> Grip:
    """Lock the whole file, for this open descriptor."""
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


def lock_byte(descriptor: int, place: int) -> Grip:
    """Lock one byte of the file, for this process: its threads exclude each other not at all."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        if error.errno in _TAKEN:
            return "busy"
        if error.errno in _NO_LOCKS:
            return "unsupported"
        raise
    return "held"


def unlock_byte(descriptor: int, place: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
