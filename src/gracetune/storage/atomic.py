"""Atomic writes: a file or folder appears under its final name complete and on disk, or not at all.

Data is written to a temporary name in the target folder, flushed with fsync and renamed. Then the folder itself is
flushed, because a rename is durable only once its folder is. The writing process holds a file lock on its temporary
file, so `sweep` can tell files in use from those a killed process left. The kernel releases the lock when the process
ends, however it ends. Process ids and clocks are not used: they can be reused, wrong, or those of another machine.

`LineFile` appends lines. Each line goes to the kernel in one write, so even `kill -9` loses no completed line.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gracetune.storage.locks import is_at, lock
from gracetune.units import MIB

_TEMPORARY = re.compile(r"\.?gracetune-[0-9a-f]{32}\.tmp")  # without the dot: caches of earlier releases
_MAX_BUFFERS = 512
"""Buffers per `writev` call. The kernel accepts at most 1024 (IOV_MAX)."""
_MAX_BYTES = 8 * MIB
"""Bytes per `writev` call."""


def sync_folder(folder: str | Path) -> None:
    """Flush a folder's entries to disk. A rename is durable only after this."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(path: str | Path) -> None:
    """Flush a file that other code wrote."""
    _sync(path, 0)


def _sync(path: str | Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        with _naming(path):
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
    """Write a file atomically. An existing file stays in place until the new one is complete.

    `data` may be an iterable of buffers, so that gigabytes need not be held twice. The umask applies to `mode`. With
    `replace=False` an existing file is left alone and FileExistsError is raised.
    """
    with unfinished(path.parent, mode) as (descriptor, temporary):
        _write_all(descriptor, (data,) if isinstance(data, bytes) else data, path)
        if replace:
            temporary.replace(path)
        else:
            _publish(temporary, path)
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file atomically through a library that opens the path itself. Yields a temporary path to write to."""
    with unfinished(path.parent) as (_, temporary):
        yield temporary
        sync_file(temporary)  # by path, not by our descriptor: the library may have created a new file there
        temporary.replace(path)
    sync_folder(path.parent)


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Create a file and flush it. Fails if the path exists. For files in a folder that is not published yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _write_all(descriptor, chunks, path)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Give every OSError raised the path. A call on a descriptor (`writev`, `fsync`) fails without one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def unfinished(folder: Path, mode: int = 0o666) -> Iterator[tuple[int, Path]]:
    """Create a temporary file, locked against `sweep`. It is removed at the end unless it was renamed."""
    descriptor, path = _new(folder, mode)
    try:
        yield descriptor, path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Raise OSError if no file can be created in the folder."""
    with unfinished(folder):
        pass


def _new(folder: Path, mode: int) -> tuple[int, Path]:
    while True:
        path = folder / temporary_name()
        # Not `tempfile`: it always creates files with mode 0600, and these must follow the user's umask.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            if lock(descriptor, exclusive=True) != "busy" and is_at(descriptor, path):
                return descriptor, path
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process swept the file between its creation and our lock: try another name


def _write_all(descriptor: int, chunks: Iterable[bytes | memoryview], path: Path) -> None:
    """Write all buffers and flush them. They are written in groups, so that many small ones do not cost a system call
    each. Errors of the file name it; errors of `chunks` do not."""
    group: list[memoryview] = []
    size = 0
    for chunk in chunks:
        if len(chunk):
            group.append(memoryview(chunk).cast("B"))
            size += len(group[-1])
        del chunk  # free it before the iterator produces the next one, which may be as large
        if len(group) == _MAX_BUFFERS or size >= _MAX_BYTES:
            with _naming(path):
                _write_group(descriptor, group)
            group, size = [], 0
    with _naming(path):
        _write_group(descriptor, group)
        os.fsync(descriptor)


def _write_group(descriptor: int, group: list[memoryview]) -> None:
    while group:
        written = os.writev(descriptor, group)
        # `writev` may write less than asked. Drop the complete buffers and cut the one it stopped in.
        while group and written >= len(group[0]):
            written -= len(group.pop(0))
        if written:
            group[0] = group[0][written:]


def link_or_copy(source: str, target: str) -> str:
    """Hard-link a file, or copy it where the file system has no links. Returns `target`, like `shutil.copy2`."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _publish(temporary: Path, path: Path) -> None:
    """Give the file its name, or raise FileExistsError if the name is taken.

    A hard link fails on an existing name, where a rename would replace the file. File systems without hard links get a
    check and a rename, which leaves a short race.
    """
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
    """Create a folder atomically. Yields a temporary folder to fill; it is renamed to `path` at the end.

    `path` may exist if it is an empty folder. Pass `files_synced=True` if `write_new` wrote every file, so that none is
    flushed twice.
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
    """Flush every file and folder inside, then rename the temporary folder to `path`."""
    for folder, _, files in os.walk(temporary):
        for name in () if files_synced else files:
            sync_file(f"{folder}/{name}")
        sync_folder(folder)
    temporary.rename(path)
    sync_folder(path.parent)


# -- leftovers of killed processes ------------------------------------------------------------------------------------


def temporary_name() -> str:
    return f".gracetune-{secrets.token_hex(16)}.tmp"


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def sweep(folder: Path) -> int:
    """Remove unfinished files of processes that have ended; none where files cannot be locked. Returns their number."""
    swept = 0
    for name in os.listdir(folder):  # noqa: PTH208 - a folder may hold a million names: no Path object for each
        if is_temporary(name):
            swept += _remove_if_abandoned(folder / name)
    return swept


def sweep_folders(folder: Path) -> int:
    """Remove unfinished folders. Folders carry no lock, so the caller must keep other writers out meanwhile."""
    unfinished_folders = _unfinished_folders(folder)
    for path in unfinished_folders:
        shutil.rmtree(path, ignore_errors=True)
    return len(unfinished_folders)


def leftover_bytes(folder: Path) -> int:
    """The bytes that `sweep_folders` would free."""
    files = [path for inner in _unfinished_folders(folder) for path in inner.rglob("*") if not path.is_symlink()]
    return sum(path.stat().st_size for path in files if path.is_file()) if files else 0


def _unfinished_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if is_temporary(path.name) and path.is_dir() and not path.is_symlink()]


def _remove_if_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # already removed, or owned by another user
        return False
    try:
        if lock(descriptor, exclusive=True) != "held" or not is_at(descriptor, path):
            return False
        path.unlink()
        return True
    except OSError:  # a leftover file only costs disk space, so failing to remove it is not an error
        return False
    finally:
        os.close(descriptor)


# -- appended lines ----------------------------------------------------------------------------------------------------


class LineFile:
    """A file opened for appending, which may exist from an earlier process. `close` flushes it to disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                # A killed process can leave half a line. End it, so that the next line stays readable.
                os.write(self._descriptor, b"\n")
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, line: bytes) -> None:
        """Append one line, which must end with a newline. A line that cannot be written whole is removed."""
        rest = line
        try:
            while rest:  # usually one call; the kernel writes less on a disk that is nearly full
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if len(rest) < len(line):
                with suppress(OSError):
                    size = os.fstat(self._descriptor).st_size
                    os.ftruncate(self._descriptor, size - (len(line) - len(rest)))
            raise

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # pipes and devices have no fsync
                raise
        finally:
            os.close(self._descriptor)
