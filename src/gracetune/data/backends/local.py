"""A folder on this machine.

The root may be absolute, relative, a link or have any name; it is resolved once, so that neither a changed working
directory nor a moved link changes what is read. A link below the root is followed as long as it stays inside. That
guards against what datasets contain (a link in a downloaded archive), not against a process that swaps folders for
links while we look: such a process has the user's rights already.

Hidden files are listed like all others: what is training data is decided by those who know extensions. Links to folders
are not walked into: what lies inside the root is listed under its own name anyway, so nothing is lost, nothing counts
twice and no loop is ever entered.

`read` copies the file instead of mapping it. A mapped file that somebody truncates kills the reading process with
SIGBUS; a copy is a valid picture or an error that names the file.
"""

from __future__ import annotations

import errno
import io
import os
import stat as modes
from collections.abc import Callable, Iterator, MutableSequence
from pathlib import Path
from typing import BinaryIO, Final

from gracetune.data.backend import FileStat
from gracetune.data.backends.errors import StorageError, told
from gracetune.data.backends.handle import SourceHandle
from gracetune.data.backends.listing import LeftOut, Listing
from gracetune.data.backends.paths import checked, printable
from gracetune.data.backends.record import DatasetBackend
from gracetune.data.backends.shared import Storage, why_unlisted
from gracetune.data.errors import MissingFileError, OutsideRootError, UnreadableMediaError

# NONBLOCK: a named pipe must not hang us before we can see that it is none of the files we read.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_PIECE: Final = 1 << 20
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class LocalBackend(Storage):
    """See `gracetune.data.backend.Backend` for the contract."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._given = os.fspath(root)
        # Not Path.expanduser: that raises a RuntimeError where there is no such user.
        self._folder = _resolved(os.path.expanduser(self._given.replace("\0", "")))  # noqa: PTH111
        if "\0" in self._given or not Path(self._folder).is_dir():
            found = "a file" if Path(self._folder).is_file() else "nothing there"
            raise StorageError(
                told(self._given, found=found, expected="a folder", hint="check the spelling of the dataset's path")
            )
        self._plain_folders = {""}
        """Folders below the root that are reached without a link: each is looked at once, not once for every file."""

    @property
    def root(self) -> str:
        return self._given

    def handle(self) -> SourceHandle:
        """What another process of this machine needs to open the same folder."""
        return SourceHandle(kind="local", root=self._folder)

    def survey(self) -> Listing:
        """Every regular file, and what is there besides."""
        files: dict[str, FileStat] = {}
        left_out: list[LeftOut] = []
        pending = [""]
        while pending:
            for found, entry in self._entries(pending.pop(), left_out):
                outcome = self._judge(found, entry)
                if isinstance(outcome, FileStat):
                    files[found] = outcome
                elif outcome is None:
                    pending.append(f"{found}/")
                else:
                    left_out.append(LeftOut(printable(found), outcome))
        return Listing(dict(sorted(files.items())), tuple(sorted(left_out, key=lambda item: item.path)))

    def _entries(self, folder: str, left_out: MutableSequence[LeftOut]) -> Iterator[tuple[str, os.DirEntry[str]]]:
        try:
            with os.scandir(f"{self._folder}/{folder}") as entries:
                yield from ((f"{folder}{entry.name}", entry) for entry in entries)
        except OSError as error:
            if not folder:
                raise StorageError(f"{self._given} cannot be listed: {error.strerror}") from error
            left_out.append(LeftOut(printable(folder), f"the folder cannot be listed: {error.strerror}"))

    def _judge(self, path: str, entry: os.DirEntry[str]) -> FileStat | str | None:
        """A file's facts, a reason to leave it out, or None for a folder to go into."""
        reason = why_unlisted(path)
        if reason is not None:
            return reason
        try:
            if entry.is_symlink():
                return self._judge_link(entry)
            if entry.is_dir(follow_symlinks=False):
                return None
            if not entry.is_file(follow_symlinks=False):
                return "neither a file nor a folder"
            return _facts(entry.stat(follow_symlinks=False))
        except OSError as error:
            return f"it cannot be looked at: {error.strerror}"

    def _judge_link(self, entry: os.DirEntry[str]) -> FileStat | str:
        target = _resolved(entry.path)
        if not self._contains(target):
            return "a link that leads out of the folder"
        if entry.is_dir():
            return "a link to a folder; what is in it is listed under its own name"
        if not entry.is_file():
            return "a link to nothing that can be read"
        return _facts(entry.stat())

    def stat(self, path: str) -> FileStat:
        try:
            found = os.stat(self._inside(path), follow_symlinks=False)  # noqa: PTH116 - Path would join it again
        except OSError as error:
            raise self._unread(path, error) from error
        if not modes.S_ISREG(found.st_mode):
            raise MissingFileError(f"{path} in {self._given} is no file")
        return _facts(found)

    def read(self, path: str) -> memoryview:
        descriptor, size = self._opened(path)
        try:
            # Not io.FileIO: of a small file it takes as long to make one as to read the file.
            pieces = [os.read(descriptor, size + 1)]
            while piece := os.read(descriptor, _PIECE):
                pieces.append(piece)
        except OSError as error:
            raise self._unread(path, error) from error
        finally:
            os.close(descriptor)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(io.FileIO(self._opened(path)[0]))

    def _opened(self, path: str) -> tuple[int, int]:
        """A descriptor of a regular file, and its size."""
        try:
            descriptor = self._descriptor(checked(path, self._given))
        except OSError as error:
            raise self._unread(path, error) from error
        found = os.fstat(descriptor)
        if modes.S_ISREG(found.st_mode):
            return descriptor, found.st_size
        os.close(descriptor)
        if modes.S_ISDIR(found.st_mode):
            raise MissingFileError(f"{path} in {self._given} is a folder, not a file")
        raise UnreadableMediaError(path, "neither a file nor a folder")

    def _descriptor(self, path: str) -> int:
        if self._is_plain(path.rpartition("/")[0]):
            try:
                return os.open(f"{self._folder}/{path}", _READ_FLAGS)
            except OSError as error:
                if error.errno != errno.ELOOP:  # what NOFOLLOW says of a link
                    raise
        return os.open(self._resolve(path), _READ_FLAGS)

    def _unread(self, path: str, error: OSError) -> MissingFileError | UnreadableMediaError:
        if error.errno in _ABSENT:
            return MissingFileError(f"{path} does not exist in {self._given}")
        if error.errno == errno.ELOOP:
            return UnreadableMediaError(path, "a link that leads back to itself")
        return UnreadableMediaError(path, f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})")

    def _inside(self, path: str) -> str:
        """Where a path really leads, links followed; never outside the root."""
        target = f"{self._folder}/{checked(path, self._given)}"
        if self._is_plain(path.rpartition("/")[0]) and not _has_mode(target, modes.S_ISLNK):
            return target  # the usual case, at a fraction of what resolving every folder above costs
        return self._resolve(path)

    def _is_plain(self, folder: str) -> bool:
        """Whether a folder below the root is one, and no part of its path a link."""
        if folder in self._plain_folders:
            return True
        if not self._is_plain(folder.rpartition("/")[0]) or not _has_mode(f"{self._folder}/{folder}", modes.S_ISDIR):
            return False
        self._plain_folders.add(folder)
        return True

    def _resolve(self, path: str) -> str:
        target = _resolved(f"{self._folder}/{path}")
        if not self._contains(target):
            raise OutsideRootError(f"{path} leads out of {self._given} through a link\n  try  copy the file into it")
        return target

    def _contains(self, target: str) -> bool:
        return target == self._folder or target.startswith(self._folder.rstrip("/") + "/")


BACKEND: Final = DatasetBackend("local", open=lambda opening: LocalBackend(opening.dataset.path))


def _has_mode(path: str, is_mode: Callable[[int], bool]) -> bool:
    """Of the path itself, not of what a link leads to."""
    try:
        return is_mode(os.lstat(path).st_mode)
    except OSError:
        return False  # whoever opens it is told why


def _resolved(path: str) -> str:
    # Not Path.resolve: that raises a RuntimeError where a link leads back to itself.
    return os.path.realpath(path)


def _facts(found: os.stat_result) -> FileStat:
    return FileStat(size=found.st_size, modified_ns=found.st_mtime_ns)
