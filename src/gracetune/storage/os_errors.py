"""Operating system errors as messages: what was found, what was expected and what to do. One table covers them all.

    with explained("checkpoint", folder, elsewhere="set output_dir to another disk"):
        write_file(folder / "state.json", data)

turns every `OSError` into a `FileError`. Callers with an error class of their own use `problem_of` or `explain`.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gracetune.errors import GracetuneError, Problem
from gracetune.storage.atomic import is_temporary

Access = Literal["read", "write"]
Kind = Literal["full", "forbidden", "in_the_way", "absent", "broken", "unreachable", "limit", "other"]
AGAIN: Final = "then run the same command again"


class FileError(GracetuneError):
    """A file or folder cannot be read or written; the message ends with the remedy."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Cause:
    kind: Kind
    found: str
    expected: str
    remedy: str


@dataclass(frozen=True)
class _Words:
    """A row of the message table. `{place}` is replaced by the caller's file or folder and `{file}` by the one in the
    error, both quoted for a shell; `{access}` by "read" or "write"."""

    kind: Kind
    expected: str
    remedy: str


_SERVER: Final = _Words(
    "unreachable",
    "a file server that answers",
    "look at the server, the network and the mount (`findmnt -T {place}`, `dmesg`)",
)
_DEVICE: Final = _Words("broken", "a disk that is connected", "look at `lsblk`, `dmesg` and `findmnt -T {place}`")
_TAKEN: Final = _Words("in_the_way", "an unused name", "look at `ls -ld {file}` and move the existing file or folder")
_IN_USE: Final = _Words("in_the_way", "a file that is not in use", "`fuser -v {file}` names the process; wait for it")

_WORDS: Final[dict[int, _Words]] = {
    errno.ENOSPC: _Words(
        "full", "free space on the disk", "free space on it (`df -h {place}`; `df -i {place}` counts files)"
    ),
    errno.EDQUOT: _Words("full", "room in your disk quota", "remove some of your files or ask for more (`quota -s`)"),
    errno.EFBIG: _Words(
        "full", "a limit that allows files of this size", "raise the limit (`ulimit -f`), or use another file system"
    ),
    errno.EACCES: _Words("forbidden", "permission to {access}", "`namei -l {file}` shows who may {access} there"),
    errno.EPERM: _Words(
        "forbidden", "permission to {access}", "look at `ls -ld {file}` and `lsattr -d {file}` (an `i` forbids changes)"
    ),
    errno.EROFS: _Words(
        "forbidden",
        "a file system mounted for writing",
        "look at `findmnt -T {place}` and `dmesg` (a damaged file system is mounted read-only)",
    ),
    errno.ENOTDIR: _Words(
        "in_the_way", "a folder at each part of the path", "`namei -l {file}` shows which part is a file; move it away"
    ),
    errno.EISDIR: _Words("in_the_way", "a file, not a folder", "look at `ls -ld {file}` and move the folder away"),
    errno.EEXIST: _TAKEN,
    errno.ENOTEMPTY: _TAKEN,
    errno.ELOOP: _Words("in_the_way", "links without a cycle", "`namei -l {file}` shows the links; remove the cycle"),
    errno.EBUSY: _IN_USE,
    errno.ETXTBSY: _IN_USE,
    errno.ENOENT: _Words(
        "absent",
        "a file or folder that exists",
        "look at `namei -l {file}`: it was removed, or a link is broken",
    ),
    errno.EIO: _Words("broken", "a disk without errors", "look at the disk (`dmesg`, `smartctl -a`)"),
    errno.EUCLEAN: _Words("broken", "a file system without damage", "look at `dmesg`, unmount it and run `fsck`"),
    errno.ENODEV: _DEVICE,
    errno.ENXIO: _DEVICE,
    errno.ESTALE: _Words(
        "unreachable",
        "a file that the server still has",
        "the server has replaced it or lost its export: mount it again (`findmnt -T {place}`)",
    ),
    errno.ETIMEDOUT: _SERVER,
    errno.EHOSTDOWN: _SERVER,
    errno.EHOSTUNREACH: _SERVER,
    errno.ENETDOWN: _SERVER,
    errno.ENETUNREACH: _SERVER,
    errno.ENOTCONN: _SERVER,
    errno.ECONNABORTED: _SERVER,
    errno.ECONNREFUSED: _SERVER,
    errno.ECONNRESET: _SERVER,
    errno.EREMOTEIO: _SERVER,
    errno.ENAMETOOLONG: _Words("limit", "a shorter name", "shorten the name, or the path to it"),
    errno.EMFILE: _Words("limit", "fewer open files", "raise the limit of this shell (`ulimit -n 65536`)"),
    errno.ENFILE: _Words("limit", "fewer open files", "raise the limit of this machine (`sysctl fs.file-max`)"),
    errno.ENOMEM: _Words("limit", "free memory", "free memory (`free -h`)"),
    errno.ENOLCK: _Words("limit", "file locks", "mount the file system with locks (`findmnt -T {place}`)"),
}
_UNKNOWN: Final = _Words(
    "other", "a place we may {access}", "look at `ls -ld {file}`, `findmnt -T {place}` and `dmesg`"
)


def is_of_disk(error: OSError) -> bool:
    """Whether the error is one of a disk or of its file system, even if it names no file."""
    words = _WORDS.get(error.errno or 0)
    return error.errno in (errno.EROFS, errno.ESTALE) or (words is not None and words.kind in ("full", "broken"))


def explain(error: OSError, path: Path, *, access: Access = "write") -> Cause:
    """Explain an error. `path` is the caller's file or folder; the error may name another one, or none."""
    words = _WORDS.get(error.errno or 0, _UNKNOWN)
    named = Path(error.filename) if isinstance(error.filename, str) else path
    path = _without_temporary(path)
    file = _without_temporary(named)
    values = {"place": shlex.quote(str(path)), "file": shlex.quote(str(file)), "access": access}
    found = _found(error, named, path)
    return Cause(words.kind, found, words.expected.format(**values), words.remedy.format(**values))


def _without_temporary(path: Path) -> Path:
    """The nearest parent that outlives a temporary name, which no longer exists when the message is read."""
    temporary = [folder for folder in (path, *path.parents) if is_temporary(folder.name)]
    return temporary[-1].parent if temporary else path


def _found(error: OSError, file: Path, path: Path) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    name = errno.errorcode.get(error.errno or 0)
    if error.strerror and name is not None:
        reason += f" ({name})"
    parts = [part for part in file.parts if not is_temporary(part)]
    file = Path(*parts)
    if file == path:
        return reason
    return f"{reason}, at {file.relative_to(path) if file.is_relative_to(path) else file}"


def problem_of(
    error: OSError, key: str, path: Path, *, access: Access = "write", elsewhere: str = "", then: str = AGAIN
) -> Problem:
    """The error as a Problem of `key`. `elsewhere` offers a remedy that avoids this place: "set output_dir to another
    disk". `then` says what to do after the remedy."""
    cause = explain(error, path, access=access)
    hint = f"{cause.remedy}, or {elsewhere}" if elsewhere else cause.remedy
    return Problem(key, cause.found, cause.expected, f"{hint}; {then}" if then else hint, str(_without_temporary(path)))


@contextmanager
def explained(
    key: str, path: Path, *, access: Access = "write", elsewhere: str = "", then: str = AGAIN
) -> Iterator[None]:
    """Turn every OSError inside the `with` block into a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(problem_of(error, key, path, access=access, elsewhere=elsewhere, then=then)) from error
