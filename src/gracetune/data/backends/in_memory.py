"""A dataset staged in main memory: its files are read once and then served without accessing the source again.

The staged files are a snapshot. Later changes of the source are not seen. Staged memory ends with the processes that
use it, so a restarted run stages everything again.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterable, Sequence
from typing import BinaryIO, Protocol

from gracetune.data.backend import FileStat, LeftOut, Listing
from gracetune.data.backends.paths import checked
from gracetune.data.backends.storage import StagedHandle, Storage, from_json, own_start_time, process_start_time
from gracetune.data.backends.stream import stream_over
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.data.staging.report import StagingReport
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.segment import Segment, SegmentEntry, SegmentHandle
from gracetune.hostmem.sharing import LocalRanks, fetch


class Closable(Protocol):
    def close(self) -> None: ...


class InMemoryBackend(Storage):
    """A backend for staged files. `gracetune.data.backend.Backend` describes its methods; `open_backend` creates one.

    `read` returns a view of the staged memory, which stays valid after `close`, or a decompressed copy if the file is
    stored compressed. A file that could not be read during staging is listed like the others, and `read` raises an
    error with the reason. `left_out` is for a backend without a `report`, which has its own.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        *,
        root: str,
        report: StagingReport | None = None,
        left_out: tuple[LeftOut, ...] = (),
    ) -> None:
        self._segments = list(segments)
        self._root = root
        self._left_out = left_out if report is None else report.left_out
        self._unselected = () if report is None else report.unselected
        self._companions: list[Closable] = []
        self._closed = False
        self.report = report
        """The result of staging; None in a process that attached to the data of another one."""

    @property
    def root(self) -> str:
        return self._root

    @property
    def stored(self) -> int:
        """Bytes of memory used by the staged files and their indexes. All processes share them."""
        return sum(segment.resident for segment in self._segments)

    def survey(self) -> Listing:
        self._check_open()
        files = {entry.path: _facts(entry) for segment in self._segments for entry in segment}
        return Listing(dict(sorted(files.items())), self._left_out, self._unselected)

    def stat(self, path: str) -> FileStat:
        return _facts(self._find(path)[1])

    def read(self, path: str) -> memoryview:
        segment, entry = self._find(path)
        if entry.unreadable:
            raise UnreadableMediaError(entry.path, segment.reason(entry))
        return segment.read(entry)

    def open(self, path: str) -> BinaryIO:
        return stream_over(self.read(path))

    def digest(self, path: str) -> str | None:
        """The content's xxh3-128, computed during staging; None if the file could not be read."""
        entry = self._find(path)[1]
        return None if entry.unreadable else entry.digest.hex()

    def handle(self) -> StagedHandle:
        """A handle with which another process of this machine can map the same pages while this backend is open."""
        self._check_open()
        return StagedHandle(
            pid=os.getpid(),
            started=own_start_time(),
            root=self._root,
            segments=tuple(segment.handle() for segment in self._segments),
            left_out=self._left_out,
        )

    def descriptors(self) -> Sequence[int]:
        """The file descriptors of the segments in `handle`, for sending over a socket."""
        return [segment.fileno() for segment in self._segments]

    def keep(self, companion: Closable) -> None:
        """Close something together with this backend."""
        self._companions.append(companion)

    def close(self) -> None:
        """Release the memory. The kernel frees it once no other process and no view uses it."""
        self._closed = True
        for part in (*self._companions, *self._segments):
            part.close()

    def _find(self, path: str) -> tuple[Segment, SegmentEntry]:
        checked(path, self._root)
        self._check_open()
        for segment in self._segments:
            entry = segment.find(path)
            if entry is not None:
                return segment, entry
        raise MissingFileError(f"{path} is not among the staged files of {self._root}")

    def _check_open(self) -> None:
        if self._closed:
            raise StagingError(f"the staged data of {self._root} has been closed")


def attach(handle: StagedHandle, files: Sequence[io.FileIO] | None = None) -> InMemoryBackend:
    """Map what another process has staged. `files` are its descriptors, if they were received over a socket."""
    descriptors = files if files is not None else _open_descriptors(handle)
    segments: list[Segment] = []
    try:
        for expected, file in zip(handle.segments, descriptors, strict=True):
            segments.append(_attached(expected, file))
    except BaseException:
        opened: list[Closable] = [*segments, *descriptors]
        for part in opened:
            part.close()
        raise
    return InMemoryBackend(segments, root=handle.root, left_out=handle.left_out)


def fetch_staged(ranks: LocalRanks, dataset: str) -> tuple[StagedHandle, list[io.FileIO]]:
    """The handle of what rank 0 of this machine has staged, and our own descriptors for it.

    Raises StagingError with rank 0's reason if it could not stage.
    """
    content, files = fetch(ranks, dataset)
    try:
        handle = from_json(json.dumps(content))
        if not isinstance(handle, StagedHandle):
            raise StagingError(f"rank 0 sent a handle of kind {handle.kind}, expected in_memory")
    except StagingError:
        for file in files:
            file.close()
        raise
    return handle, files


def _attached(expected: SegmentHandle, file: io.FileIO) -> Segment:
    segment = Segment(file)
    if (segment.identity, segment.size) != (expected.identity, expected.size):
        segment.close()
        raise StagingError("the descriptor now refers to other staged data\n  try  request a new handle")
    return segment


def _open_descriptors(handle: StagedHandle) -> list[io.FileIO]:
    """Open the descriptors of the other process through /proc."""
    if process_start_time(handle.pid) != handle.started:
        ended = f"the process that staged {handle.root} (pid {handle.pid}) has ended"
        raise StagingError(f"{ended}\n  try  restart the run: it stages again")
    files: list[io.FileIO] = []
    try:
        for segment in handle.segments:
            path = f"/proc/{handle.pid}/fd/{segment.descriptor}"
            files.append(io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
            if os.fstat(files[-1].fileno()).st_ino != segment.inode:
                raise FileNotFoundError(errno.ENOENT, "closed, and the descriptor number was reused")
    except OSError as error:
        for file in files:
            file.close()
        reasons = {errno.ENOENT: "the process has closed it", errno.EACCES: "the process runs as another user"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise StagingError(f"the data staged by process {handle.pid} cannot be opened: {reason}") from error
    return files


def _facts(entry: SegmentEntry) -> FileStat:
    return FileStat(size=entry.size, modified_ns=entry.modified_ns)
