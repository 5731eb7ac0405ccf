"""The backend of a folder on this machine.

The root may be absolute, relative or a symbolic link. It is resolved once, so a later change of the working directory
or of the link does not change what is read. Links below the root are followed if their target is inside it. This
protects against links in a dataset, such as one in a downloaded archive. It does not protect against a process that
replaces folders by links while we read, because such a process already has the user's permissions.

Hidden files are listed like all others; callers decide which files are training data. Links to folders are not
followed when listing. Their content inside the root is listed under its own path anyway, so nothing is lost or counted
twice, and there can be no loop.

`read` copies the file instead of mapping it. If a mapped file is truncated, the reading process is killed by SIGBUS. A
copy is either complete or leads to an error that names the file.
"""

from __future__ import annotations

import errno
import io
import os
import stat as modes
from collections.abc import Callable, Iterator, MutableSequence
from pathlib import Path
from typing import BinaryIO, Final

from gracetune.data.backend import FileStat, LeftOut, Listing
from gracetune.data.backends.errors import StorageError, problem_text
from gracetune.data.backends.paths import checked, printable
from gracetune.data.backends.record import DatasetBackend
from gracetune.data.backends.storage import SourceHandle, Storage, unlisted_reason
from gracetune.data.errors import MissingFileError, OutsideRootError, UnreadableMediaError

# O_NONBLOCK: opening a named pipe must not block before its type can be checked.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CHUNK: Final = 1 << 20
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class LocalBackend(Storage):
    """The files of a local folder. `gracetune.data.backend.Backend` describes the methods."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._given = os.fspath(root)
        # Not `Path.expanduser`, which raises RuntimeError for an unknown user.
        self._folder = _resolved(os.path.expanduser(self._given.replace("\0", "")))  # noqa: PTH111
        if "\0" in self._given or not Path(self._folder).is_dir():
            found = "a file" if Path(self._folder).is_file() else "no such folder"
            raise StorageError(
                problem_text(
                    self._given, found=found, expected="a folder", hint="check the spelling of the dataset's path"
                )
            )
        self._link_free_folders = {""}
        """Folders below the root whose path contains no link. Each is checked once, not once for each file."""

    @property
    def root(self) -> str:
        return self._given

    def handle(self) -> SourceHandle:
        """A handle with which another process of this machine can open the same folder."""
        return SourceHandle(kind="local", root=self._folder)

    def survey(self) -> Listing:
        """Every regular file below the root, and everything else with the reason it is left out."""
        files: dict[str, FileStat] = {}
        left_out: list[LeftOut] = []
        pending = [""]
        while pending:
            for path, entry in self._entries(pending.pop(), left_out):
                outcome = self._classify(path, entry)
                if isinstance(outcome, FileStat):
                    files[path] = outcome
                elif outcome is None:
                    pending.append(f"{path}/")
                else:
                    left_out.append(LeftOut(printable(path), outcome))
        return Listing(dict(sorted(files.items())), tuple(sorted(left_out, key=lambda item: item.path)))

    def _entries(self, folder: str, left_out: MutableSequence[LeftOut]) -> Iterator[tuple[str, os.DirEntry[str]]]:
        try:
            with os.scandir(f"{self._folder}/{folder}") as entries:
                yield from ((f"{folder}{entry.name}", entry) for entry in entries)
        except OSError as error:
            if not folder:
                raise StorageError(f"{self._given} cannot be listed: {error.strerror}") from error
            left_out.append(LeftOut(printable(folder), f"the folder cannot be listed: {error.strerror}"))

    def _classify(self, path: str, entry: os.DirEntry[str]) -> FileStat | str | None:
        """A file's size and time, the reason to leave it out, or None for a folder to descend into."""
        reason = unlisted_reason(path)
        if reason is not None:
            return reason
        try:
            if entry.is_symlink():
                return self._classify_link(entry)
            if entry.is_dir(follow_symlinks=False):
                return None
            if not entry.is_file(follow_symlinks=False):
                return "neither a file nor a folder"
            return _file_stat(entry.stat(follow_symlinks=False))
        except OSError as error:
            return f"it cannot be accessed: {error.strerror}"

    def _classify_link(self, entry: os.DirEntry[str]) -> FileStat | str:
        target = _resolved(entry.path)
        if not self._contains(target):
            return "a link that leads out of the folder"
        if entry.is_dir():
            return "a link to a folder; the files in it are listed under their own path"
        if not entry.is_file():
            return "a link to something that is not a readable file"
        return _file_stat(entry.stat())

    def stat(self, path: str) -> FileStat:
        try:
            found = os.stat(self._real_path(path), follow_symlinks=False)  # noqa: PTH116 - a Path object costs more time
        except OSError as error:
            raise self._read_error(path, error) from error
        if not modes.S_ISREG(found.st_mode):
            raise MissingFileError(f"{path} in {self._given} is not a file")
        return _file_stat(found)

    def read(self, path: str) -> memoryview:
        descriptor, size = self._open_descriptor(path)
        try:
            # Not `io.FileIO`: creating one takes as long as reading a small file.
            chunks = [os.read(descriptor, size + 1)]
            while chunk := os.read(descriptor, _CHUNK):
                chunks.append(chunk)
        except OSError as error:
            raise self._read_error(path, error) from error
        finally:
            os.close(descriptor)
        return memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(io.FileIO(self._open_descriptor(path)[0]))

    def _open_descriptor(self, path: str) -> tuple[int, int]:
        """Open a regular file. Returns its descriptor and size."""
        try:
            descriptor = self._open_below(checked(path, self._given))
        except OSError as error:
            raise self._read_error(path, error) from error
        found = os.fstat(descriptor)
        if modes.S_ISREG(found.st_mode):
            return descriptor, found.st_size
        os.close(descriptor)
        if modes.S_ISDIR(found.st_mode):
            raise MissingFileError(f"{path} in {self._given} is a folder, not a file")
        raise UnreadableMediaError(path, "neither a file nor a folder")

    def _open_below(self, path: str) -> int:
        if self._is_link_free(path.rpartition("/")[0]):
            try:
                return os.open(f"{self._folder}/{path}", _READ_FLAGS)
            except OSError as error:
                if error.errno != errno.ELOOP:  # O_NOFOLLOW fails with ELOOP on a link
                    raise
        return os.open(self._resolve(path), _READ_FLAGS)

    def _read_error(self, path: str, error: OSError) -> MissingFileError | UnreadableMediaError:
        if error.errno in _ABSENT:
            return MissingFileError(f"{path} does not exist in {self._given}")
        if error.errno == errno.ELOOP:
            return UnreadableMediaError(path, "a link that leads back to itself")
        return UnreadableMediaError(path, f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})")

    def _real_path(self, path: str) -> str:
        """The real path of a file with links resolved, which is always inside the root."""
        target = f"{self._folder}/{checked(path, self._given)}"
        if self._is_link_free(path.rpartition("/")[0]) and not _has_mode(target, modes.S_ISLNK):
            return target  # the usual case: much faster than resolving every parent folder
        return self._resolve(path)

    def _is_link_free(self, folder: str) -> bool:
        """Whether this is a folder below the root and no part of its path is a link."""
        if folder in self._link_free_folders:
            return True
        if not self._is_link_free(folder.rpartition("/")[0]) or not _has_mode(
            f"{self._folder}/{folder}", modes.S_ISDIR
        ):
            return False
        self._link_free_folders.add(folder)
        return True

    def _resolve(self, path: str) -> str:
        target = _resolved(f"{self._folder}/{path}")
        if not self._contains(target):
            raise OutsideRootError(
                f"{path} leads out of {self._given} through a link\n  try  copy the file into the folder"
            )
        return target

    def _contains(self, target: str) -> bool:
        return target == self._folder or target.startswith(self._folder.rstrip("/") + "/")


BACKEND: Final = DatasetBackend("local", open=lambda opening: LocalBackend(opening.dataset.path))


def _has_mode(path: str, is_mode: Callable[[int], bool]) -> bool:
    """Check the mode of the path itself, without following a link."""
    try:
        return is_mode(os.lstat(path).st_mode)
    except OSError:
        return False  # opening the path will report the reason


def _resolved(path: str) -> str:
    # Not `Path.resolve`, which raises RuntimeError for a cycle of links.
    return os.path.realpath(path)


def _file_stat(found: os.stat_result) -> FileStat:
    return FileStat(size=found.st_size, modified_ns=found.st_mtime_ns)
