"""Files that appear whole or not at all, and locks that die with their process.

Everything here rests on `flock`: the kernel lets go of it when its process ends, however it ends. Process ids, start
times and clocks, which can be reused, be of another machine or be wrong, take no part.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from gracetune.storage.atomic import sync_folder

Grip = Literal["held", "busy", "unsupported"]

_TEMPORARY = re.compile(r"gracetune-[0-9a-f]{32}\.tmp")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Some network file systems are mounted without locks."""


def lock(descriptor: int, *, exclusive: bool, wait: bool = False) -> Grip:
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


@contextmanager
def unfinished(folder: Path) -> Iterator[tuple[int, Path]]:
    """A new file, locked against `sweep`; gone again at the end unless it was renamed."""
    descriptor, path = _new(folder)
    try:
        yield descriptor, path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _new(folder: Path) -> tuple[int, Path]:
    while True:
        path = folder / temporary_name()
        # Not tempfile: its files are for their owner alone, and these obey the user's umask.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if lock(descriptor, exclusive=True) != "busy" and is_at(descriptor, path):
            return descriptor, path
        os.close(descriptor)  # a sweep of another process came between creating and locking


def temporary_name() -> str:
    return f"gracetune-{secrets.token_hex(16)}.tmp"


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def sweep(folder: Path) -> int:
    """Remove what processes that are no more left unfinished; returns how many files."""
    swept = 0
    for name in os.listdir(folder):  # noqa: PTH208 - a million names need no Path objects
        if is_temporary(name):
            swept += _removed_if_left(folder / name)
    return swept


def _removed_if_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone already, or not ours to remove
        return False
    try:
        if lock(descriptor, exclusive=True) != "held" or not is_at(descriptor, path):
            return False
        path.unlink()
        return True
    except OSError:  # a left-over costs a little room; it is no reason to stop
        return False
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def write_file(path: Path, pieces: list[memoryview]) -> None:
    """All pieces under that name, or nothing: temp, fsync, rename, fsync of the folder."""
    with unfinished(path.parent) as (descriptor, temporary):
        _write_all(descriptor, pieces)
        os.fsync(descriptor)
        temporary.replace(path)
    sync_folder(path.parent)


def _write_all(descriptor: int, pieces: list[memoryview]) -> None:
    most = 512  # of one call; the kernel's limit is 1024
    for first in range(0, len(pieces), most):
        group = [piece for piece in pieces[first : first + most] if len(piece)]
        while group:
            written = os.writev(descriptor, group)
            while group and written >= len(group[0]):
                written -= len(group.pop(0))
            if written:
                group[0] = group[0][written:]
