"""Brings a file to this disk: resumed where it broke off, checked, and under its name only when it is complete.

The bytes so far are in a part file beside a note of what they are a part of. A transfer goes on from them if the file
elsewhere is still the same one, whether it was a connection or this process that ended. Ranges are asked for ahead of
time by several threads and written in order, so the part file is always a beginning of the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

from gracetune.storage.atomic import sync_folder, write_file
from gracetune.units import MIB

RANGE: Final = 8 * MIB
"""Of one request: what a broken connection loses, and what a slow one has to bring in its time limit."""
AHEAD: Final = 4
"""Requests of one file that are under way at once."""
_CHUNK: Final = 4 * MIB
OnBytes = Callable[[int], None]
"""Told of bytes that were added; less than nothing where some had to be given up."""
OnFetched = Callable[[int, int], None]
"""Told how many bytes are here, of how many."""


class TransferError(Exception):
    """A file did not arrive as it should have: `found` and `expected` say what differs."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(f"{found}; expected {expected}")


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere, as its storage describes it."""

    size: int | None
    """None where the storage does not say."""
    digest: str | None = None
    """`sha256:…`, `git:…` or `md5:…` of its content, where the storage tells one."""
    tag: str | None = None
    """Differs from version to version: an ETag or a time."""
    sure: bool = True
    """Whether `digest` is what it seems to be: the ETag of some encrypted objects only looks like an MD5."""


class RangeReader(Protocol):
    """Reads one file elsewhere. Used by several threads."""

    @property
    def can_seek(self) -> bool:
        """Whether `read` can begin in the middle."""
        ...

    def read(self, start: int, end: int) -> bytes: ...

    def stream(self) -> Iterator[bytes]:
        """All of it, from the beginning: for storage that cannot begin in the middle."""
        ...

    def is_final(self, error: Exception) -> bool:
        """Whether another attempt would fail the same way: no permission, no such file."""
        ...


@dataclass(frozen=True)
class Patience:
    """How often a failed request is repeated."""

    attempts: int = 6
    first_pause: float = 0.5
    """Seconds; each pause is twice the one before."""

    def pauses(self) -> Iterator[float]:
        return (self.first_pause * 2**number for number in range(self.attempts - 1))


def transfer(
    target: Path,
    part: Path,
    remote: RemoteFile,
    reader: RangeReader,
    requests: Executor,
    *,
    on_bytes: OnBytes = lambda count: None,
    patience: Patience = Patience(),  # noqa: B008 - frozen
) -> None:
    """Bring a file to `target`, by way of `part` in the same file system. Raises TransferError, and what reading does.

    A file whose content is not what its storage says is fetched once more from its beginning.
    """
    seen = ""
    while True:
        _fill(part, remote, reader, requests, on_bytes, patience)
        wrong, found = _difference(part, remote)
        if wrong is None or (not remote.sure and found == seen):  # twice the same: then the digest is of another kind
            break
        on_bytes(-part.stat().st_size)
        _discard(part)
        if seen:
            raise wrong
        seen = found or "size"
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
    sync_folder(target.parent)
    _note(part).unlink(missing_ok=True)


def begun(part: Path, remote: RemoteFile) -> int:
    """How many bytes of the file an earlier transfer left behind."""
    try:
        same = json.loads(_note(part).read_bytes()) == asdict(remote)
        size = part.stat().st_size
    except (OSError, ValueError):
        return 0
    return size if same and size <= (remote.size or 0) else 0


def _fill(
    part: Path, remote: RemoteFile, reader: RangeReader, requests: Executor, on_bytes: OnBytes, patience: Patience
) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    start = begun(part, remote) if reader.can_seek and remote.size is not None else 0
    write_file(_note(part), json.dumps(asdict(remote)).encode())
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.truncate()
        on_bytes(start)
        if reader.can_seek and remote.size is not None:
            for data in _in_order(start, remote.size, reader, requests, patience):
                file.write(data)
                file.flush()
                on_bytes(len(data))
        else:
            for data in _streamed(reader, file.truncate, file.seek, on_bytes, patience):
                file.write(data)
                on_bytes(len(data))
        file.flush()
        os.fsync(file.fileno())


def _in_order(start: int, size: int, reader: RangeReader, requests: Executor, patience: Patience) -> Iterator[bytes]:
    waiting: deque[Future[bytes]] = deque()
    try:
        while start < size or waiting:
            while start < size and len(waiting) < AHEAD:
                end = min(size, start + RANGE)
                waiting.append(requests.submit(_read, reader, start, end, patience))
                start = end
            yield waiting.popleft().result()
    finally:
        for one in waiting:
            one.cancel()


def _read(reader: RangeReader, start: int, end: int, patience: Patience) -> bytes:
    pauses = patience.pauses()
    while True:
        try:
            data = reader.read(start, end)
            if len(data) == end - start:
                return data
            failed: Exception = TransferError(f"{len(data):,} bytes from byte {start:,} on", f"{end - start:,}")
        except Exception as error:  # noqa: BLE001 - libraries of storage raise what they like; raised again below
            failed = error
        pause = None if reader.is_final(failed) else next(pauses, None)
        if pause is None:
            raise failed
        time.sleep(pause)


def _streamed(
    reader: RangeReader,
    truncate: Callable[[int], object],
    seek: Callable[[int], object],
    on_bytes: OnBytes,
    patience: Patience,
) -> Iterator[bytes]:
    """From the beginning again where it breaks off: such storage cannot go on in the middle."""
    pauses = patience.pauses()
    while True:
        count = 0
        try:
            for data in reader.stream():
                count += len(data)
                yield data
            return
        except Exception as error:
            pause = None if reader.is_final(error) else next(pauses, None)
            if pause is None:
                raise
        seek(0)
        truncate(0)
        on_bytes(-count)
        time.sleep(pause)


def _difference(part: Path, remote: RemoteFile) -> tuple[TransferError | None, str]:
    """How the content differs from what its storage says, and the digest it has."""
    size = part.stat().st_size
    if remote.size is not None and size != remote.size:
        return TransferError(f"{size:,} bytes", f"{remote.size:,} bytes, as the storage says"), ""
    if remote.digest is None:
        return None, ""
    kind = remote.digest.partition(":")[0]
    found = f"{kind}:{digest_of(part, kind)}"
    if found == remote.digest:
        return None, found
    return TransferError(f"content with {found[:24]}…", f"{remote.digest[:24]}…, as the storage says"), found


def is_of_this_disk(error: BaseException) -> bool:
    """Whether a file of this machine could not be written, as opposed to one elsewhere that could not be read."""
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return error.errno in _DISK_ERRORS or str(error.filename or "").startswith("/")


_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE)


def digest_of(path: Path, kind: str) -> str:
    """`git` is the id git gives to a file with this content."""
    digest = hashlib.md5(usedforsecurity=False) if kind == "md5" else hashlib.sha256()
    if kind == "git":
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _discard(part: Path) -> None:
    with suppress(FileNotFoundError):
        part.unlink()
    _note(part).unlink(missing_ok=True)
