"""Opening regular files only. A pipe, device, socket or folder raises OSError instead of blocking the process.

Opening a named pipe waits for a writer, reading a device may never end, and `Path.is_file` followed by a read is a
race. Files that a user downloads or names are opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from gracetune.units import MIB, format_bytes

MAX_SMALL = 64 * MIB
"""The size limit of a file that is read whole: a configuration or an index. The largest known is a vocabulary of a
quarter of this size."""
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises OSError for anything else."""
    check_regular(path)  # before opening: opening a device can have side effects
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor).st_mode)  # again after opening: the path may have been replaced in between
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | Path) -> None:
    """Raise OSError unless the path is a regular file. For libraries that open the path themselves."""
    _check(path, os.stat(path).st_mode)  # noqa: PTH116 - accepts str and Path


def read_small_file(path: str | Path, most: int = MAX_SMALL) -> bytes:
    """Read a whole file. Raises OSError if it has more than `most` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"a file of more than {format_bytes(most)}", str(path))
        return file.read()


def _check(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"{kind}, not a regular file", str(path))
