"""Reading of regular files alone: whatever else has the name is an OSError, before anything waits for it.

Opening a named pipe waits for a writer, a device may never end, and `Path.is_file` and reading are two moments. Files
that a user downloads or names are opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from gracetune.units import MIB, format_bytes

MAX_SMALL = 64 * MIB
"""Of a file that is read whole: a configuration or an index. The largest known, a vocabulary, has a fourth of it."""
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path) -> int:
    """A descriptor to read from. OSError where there is no such file, or one of another kind."""
    check_regular(path)  # before it is opened: opening a device can have an effect
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor).st_mode)  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | Path) -> None:
    """The same question, for a library that opens a name itself."""
    _check(path, os.stat(path).st_mode)  # noqa: PTH116 - takes both kinds of path


def read_small_file(path: str | Path, most: int = MAX_SMALL) -> bytes:
    """All bytes of a file. OSError where it has more than `most`."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"a file of more than {format_bytes(most)}", str(path))
        return file.read()


def _check(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"{kind}, not a regular file", str(path))
