"""Atomic writes: a file or folder appears under its name complete and on disk, or not at all.

Everything is written under a temporary name in the folder it will be in, flushed with fsync and renamed; then the
folder is flushed too. A temporary file is locked by the process that writes it, so `sweep` can remove what a killed
process left. The lock ends with its process, however that ends: process ids and clocks take no part.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gracetune.storage.locks import is_at, lock
from gracetune.units import MIB

_TEMPORARY = re.compile(r"\.?gracetune-[0-9a-f]{32}\.tmp")  # without the dot: caches of earlier releases
_MOST_PIECES = 512
"""Of one system call; the kernel's limit is 1024."""
_MOST_BYTES = 8 * MIB


def sync_folder(folder: str | Path) -> None:
    """A rename is on disk only when the folder is."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(path: str | Path) -> None:
    """For a file that something else wrote."""
    _sync(path, 0)


def _sync(path: str | Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


# -- files ------------------------------------------------------------------------------------------------------------


def write_file(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, mode: int = 0o666, replace: bool = True
) -> None:
    """Complete or absent. What was there before stays until the new file is complete.

    `data` may come in pieces, so that gigabytes need not be held twice. `mode` obeys the umask. With `replace=False` a
    file that is there already stays as it is, and FileExistsError is raised.
    """
    with unfinished(path.parent, mode) as (descriptor, temporary):
        _write_all(descriptor, (data,) if isinstance(data, bytes) else data)
        os.fsync(descriptor)
        if replace:
            temporary.replace(path)
        else:
            _publish(temporary, path)
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The same for a library that writes to a name itself: it gets a temporary one."""
    with unfinished(path.parent) as (_, temporary):
        yield temporary
        sync_file(temporary)  # by its name: the library may have put another file there
        temporary.replace(path)
    sync_folder(path.parent)


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """A file that was not there before, flushed; for files inside a folder that is itself not published yet.

    An OSError names the file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _write_all(descriptor, pieces)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = str(path)  # `write` knows only a number
        raise


@contextmanager
def unfinished(folder: Path, mode: int = 0o666) -> Iterator[tuple[int, Path]]:
    """A new file, locked against `sweep`; gone again at the end unless it was renamed."""
    descriptor, path = _new(folder, mode)
    try:
        yield descriptor, path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """OSError where no file can be made in the folder."""
    with unfinished(folder):
        pass


def _new(folder: Path, mode: int) -> tuple[int, Path]:
    while True:
        path = folder / temporary_name()
        # Not tempfile: its files are for their owner alone, and these obey the user's umask.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            if lock(descriptor, exclusive=True) != "busy" and is_at(descriptor, path):
                return descriptor, path
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # a sweep of another process came between creating and locking


def _write_all(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    group: list[memoryview] = []
    waiting = 0
    for piece in pieces:
        if len(piece):
            group.append(memoryview(piece).cast("B"))
            waiting += len(group[-1])
        del piece  # the next one may be as large
        if len(group) == _MOST_PIECES or waiting >= _MOST_BYTES:
            _write_group(descriptor, group)
            group, waiting = [], 0
    _write_group(descriptor, group)


def _write_group(descriptor: int, group: list[memoryview]) -> None:
    while group:
        written = os.writev(descriptor, group)
        while group and written >= len(group[0]):
            written -= len(group.pop(0))
        if written:
            group[0] = group[0][written:]


def link_or_copy(source: str, target: str) -> str:
    """A second name for a file; a copy where the file system has no links. Returns `target`, as `shutil.copy2` does."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _publish(temporary: Path, path: Path) -> None:
    """A link fails where the name is taken, a rename would replace; only file systems without links get a rename."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)


# -- folders ----------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(path: Path, *, files_synced: bool = False) -> Iterator[Path]:
    """A folder that appears whole: everything written to the one that is yielded. An empty folder may be there.

    `files_synced` where every file in it was written by `write_new`: they need not be flushed again.
    """
    temporary = path.with_name(temporary_name())
    temporary.mkdir()
    try:
        yield temporary
        publish_folder(temporary, path, files_synced=files_synced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_folder(temporary: Path, path: Path, *, files_synced: bool = False) -> None:
    """Flush every file and folder in it, then give it its name."""
    for folder, _, files in os.walk(temporary):
        for name in () if files_synced else files:
            sync_file(f"{folder}/{name}")
        sync_folder(folder)
    temporary.rename(path)
    sync_folder(path.parent)


# -- what killed processes leave --------------------------------------------------------------------------------------


def temporary_name() -> str:
    return f".gracetune-{secrets.token_hex(16)}.tmp"


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def sweep(folder: Path) -> int:
    """Remove what processes that are no more left unfinished; returns how many files."""
    swept = 0
    for name in os.listdir(folder):  # noqa: PTH208 - a million names need no Path objects
        if is_temporary(name):
            swept += _removed_if_left(folder / name)
    return swept


def sweep_folders(folder: Path) -> int:
    """The same for folders, which have no lock of their own: only while the caller keeps other writers out."""
    left = _left_folders(folder)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def left_bytes(folder: Path) -> int:
    """What `sweep_folders` would free."""
    files = [path for left in _left_folders(folder) for path in left.rglob("*") if not path.is_symlink()]
    return sum(path.stat().st_size for path in files if path.is_file()) if files else 0


def _left_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if is_temporary(path.name) and path.is_dir() and not path.is_symlink()]


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
