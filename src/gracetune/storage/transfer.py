"""Resumable transfers of a remote file to local disk. The file is checked, then renamed into place when complete.

The bytes received so far are in a part file; a JSON file beside it describes the remote file they belong to. A
transfer resumes from the part file if the remote file is unchanged, whether the connection or this process ended.
Several threads request ranges ahead of time and the results are written in order, so the part file is always a prefix
of the remote file.
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
"""Bytes per request. A broken connection loses at most these, and a slow one has to deliver them before the request
times out."""
AHEAD: Final = 4
"""Requests of one file that are in flight at once."""
_CHUNK: Final = 4 * MIB
OnBytes = Callable[[int], None]
"""Called with the number of bytes added; negative when received bytes were discarded."""
OnFetched = Callable[[int, int], None]
"""Called with the bytes present so far and the total."""


class TransferError(Exception):
    """A transferred file differs from its remote description. `found` and `expected` say how."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(f"{found}; expected {expected}")


@dataclass(frozen=True)
class RemoteFile:
    """A remote file as its storage describes it."""

    size: int | None
    """None if the storage does not report it."""
    digest: str | None = None
    """`sha256:…`, `git:…` or `md5:…` of the content, if the storage reports one."""
    tag: str | None = None
    """Changes with every version of the file: an ETag or a time."""
    sure: bool = True
    """Whether `digest` can be trusted. The ETag of some encrypted objects only looks like an MD5, so content that
    differs from it is accepted if a second download is equal to the first."""


class RangeReader(Protocol):
    """Reads one remote file. Called from several threads."""

    @property
    def can_seek(self) -> bool:
        """Whether `read` can start in the middle of the file."""
        ...

    def read(self, start: int, end: int) -> bytes: ...

    def stream(self) -> Iterator[bytes]:
        """Yield the whole file from the beginning. For storage that cannot start in the middle."""
        ...

    def is_final(self, error: Exception) -> bool:
        """Whether a retry would fail the same way: no permission, no such file."""
        ...


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is attempted, and the pauses between attempts."""

    attempts: int = 6
    """Including the first."""
    first_pause: float = 0.5
    """In seconds. Each pause is twice as long as the one before."""

    def pauses(self) -> Iterator[float]:
        return (self.first_pause * 2**number for number in range(self.attempts - 1))


def transfer(
    target: Path,
    part: Path,
    remote: RemoteFile,
    reader: RangeReader,
    executor: Executor,
    *,
    on_bytes: OnBytes = lambda count: None,
    retry_policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
) -> None:
    """Fetch a file to `target` through `part`, which must be on the same file system. `executor` runs the requests.

    If the content does not match the size or digest that the storage reports, the file is fetched once more from the
    beginning. Raises TransferError if it still differs, and any error of the reader.
    """
    first_found = ""
    while True:
        _fill(part, remote, reader, executor, on_bytes, retry_policy)
        wrong, found = _difference(part, remote)
        # Two equal downloads that both differ from an unsure digest: the digest is not one of the content.
        if wrong is None or (not remote.sure and found == first_found):
            break
        on_bytes(-part.stat().st_size)
        _discard(part)
        if first_found:
            raise wrong
        first_found = found or "size"  # no digest if the size differs already
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
    sync_folder(target.parent)
    _description_file(part).unlink(missing_ok=True)


def resumable_bytes(part: Path, remote: RemoteFile) -> int:
    """The number of bytes that an earlier transfer of the same file left in `part`."""
    try:
        same = json.loads(_description_file(part).read_bytes()) == asdict(remote)
        size = part.stat().st_size
    except (OSError, ValueError):
        return 0
    return size if same and size <= (remote.size or 0) else 0


def _fill(
    part: Path,
    remote: RemoteFile,
    reader: RangeReader,
    executor: Executor,
    on_bytes: OnBytes,
    retry_policy: RetryPolicy,
) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    start = resumable_bytes(part, remote) if reader.can_seek and remote.size is not None else 0
    write_file(_description_file(part), json.dumps(asdict(remote)).encode())
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.truncate()
        on_bytes(start)
        if reader.can_seek and remote.size is not None:
            for data in _in_order(start, remote.size, reader, executor, retry_policy):
                file.write(data)
                file.flush()
                on_bytes(len(data))
        else:
            for data in _streamed(reader, file.truncate, file.seek, on_bytes, retry_policy):
                file.write(data)
                on_bytes(len(data))
        file.flush()
        os.fsync(file.fileno())


def _in_order(
    start: int, size: int, reader: RangeReader, executor: Executor, retry_policy: RetryPolicy
) -> Iterator[bytes]:
    """Yield the ranges from `start` in order, with up to AHEAD requests in flight."""
    pending: deque[Future[bytes]] = deque()
    try:
        while start < size or pending:
            while start < size and len(pending) < AHEAD:
                end = min(size, start + RANGE)
                pending.append(executor.submit(_read, reader, start, end, retry_policy))
                start = end
            yield pending.popleft().result()
    finally:
        for request in pending:
            request.cancel()


def _read(reader: RangeReader, start: int, end: int, retry_policy: RetryPolicy) -> bytes:
    pauses = retry_policy.pauses()
    while True:
        try:
            data = reader.read(start, end)
            if len(data) == end - start:
                return data
            failed: Exception = TransferError(f"{len(data):,} bytes from byte {start:,} on", f"{end - start:,}")
        except Exception as error:  # noqa: BLE001 - storage libraries raise errors of any type; raised again below
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
    retry_policy: RetryPolicy,
) -> Iterator[bytes]:
    """Yield the whole file. After an interruption, start over: this kind of storage cannot resume in the middle."""
    pauses = retry_policy.pauses()
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
    """The mismatch between the part file and the remote description, if any, and the digest found."""
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


def is_local_disk_error(error: BaseException) -> bool:
    """Whether the error is about writing a local file, as opposed to reading a remote one."""
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return error.errno in _DISK_ERRORS or str(error.filename or "").startswith("/")


_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE)


def digest_of(path: Path, kind: str) -> str:
    """The content's digest in hexadecimal. `kind` is `sha256`, `md5` or `git`, the blob id that git computes."""
    digest = hashlib.md5(usedforsecurity=False) if kind == "md5" else hashlib.sha256()
    if kind == "git":
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _description_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _discard(part: Path) -> None:
    with suppress(FileNotFoundError):
        part.unlink()
    _description_file(part).unlink(missing_ok=True)
