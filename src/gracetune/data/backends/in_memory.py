"""A dataset staged in main memory: read once, then served without touching its source again.

The staged files are a snapshot of one moment. `write` and `delete` go through to the source and are seen at once by
this process, which reads a written file from the source from then on; other processes see it with the next handle.
`refresh` compares the source with what was staged (size, and modification time where the storage tells one) and stages
what differs; a restarted run stages everything afresh, since nothing of this outlives its processes.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

from gracetune.data.backend import Backend, FileStat
from gracetune.data.backends.arena import Entry
from gracetune.data.backends.errors import StagingError
from gracetune.data.backends.handle import SegmentHandle, SourceHandle, StagedHandle, own_start, process_start
from gracetune.data.backends.listing import LeftOut, Listing
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.paths import checked
from gracetune.data.backends.report import StagingReport
from gracetune.data.backends.segment import Segment
from gracetune.data.backends.shared import Storage
from gracetune.data.backends.stream import stream_over
from gracetune.data.backends.url import UrlBackend
from gracetune.data.errors import MissingFileError


@dataclass(frozen=True)
class Refreshed:
    """What differed between the source and the staged files, and is staged now."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    report: StagingReport | None
    """None where nothing differed."""

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


@dataclass(frozen=True, eq=False)
class _Change:
    """One write or deletion since staging. Two of them are never the same, which is how `refresh` knows new ones."""

    present: bool
    """Whether the source has the file, with its newer content."""


class Closable(Protocol):
    def close(self) -> None: ...


class Restager(Protocol):
    """How a backend that was staged here looks at its source again."""

    def survey(self) -> Listing:
        """The files that should be staged, as the source has them now."""
        ...

    def stage(
        self, listing: Listing, *, removed: tuple[str, ...], already: int
    ) -> tuple[Sequence[Segment], StagingReport]: ...


class InMemoryBackend(Storage):
    """See `gracetune.data.backend.Backend` for the contract, and `open_backend` for how to get one.

    `read` of a file stored as it is returns the arena's own bytes. Such a view stays valid after `close`. A file that
    could not be read when it was staged is listed as its source listed it, and `read` says why.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        *,
        root: str,
        source: Backend | None,
        report: StagingReport | None = None,
        restager: Restager | None = None,
        written: Iterable[str] = (),
        removed: Iterable[str] = (),
        left_out: tuple[LeftOut, ...] = (),
    ) -> None:
        self._segments = list(segments)
        self._root, self._source, self._restager = root, source, restager
        self._changes = {path: _Change(True) for path in written} | {path: _Change(False) for path in removed}
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._left_out = left_out if report is None else report.left_out
        self._unselected = () if report is None else report.unselected
        self._companions: list[Closable] = []
        self._closed = False
        self.report = report
        """What staging did; None in a process that only attached."""

    @property
    def root(self) -> str:
        return self._root

    @property
    def stored(self) -> int:
        """Bytes of memory the staged files and their indexes take, once for all processes."""
        return sum(segment.resident for segment in self._segments)

    def survey(self) -> Listing:
        files = {entry.path: _facts(entry) for entry in self._entries().values()}
        for path, change in self._snapshot().items():
            files.pop(path, None)
            if change.present:
                # Deleted behind our back: then it is not there, as for any other backend.
                with suppress(MissingFileError):
                    files[path] = self._written(path).stat(path)
        return Listing(dict(sorted(files.items())), self._left_out, self._unselected)

    def stat(self, path: str) -> FileStat:
        found = self._find(path)
        return self._written(path).stat(path) if found is None else _facts(found[1])

    def read(self, path: str) -> memoryview:
        found = self._find(path)
        if found is None:
            return self._written(path).read(path)
        segment, entry = found
        return segment.read(entry)

    def open(self, path: str) -> BinaryIO:
        return stream_over(self.read(path))

    def digest(self, path: str) -> str | None:
        """The content's xxh3-128 as taken while staging; None where it was not read then, or written since."""
        found = self._find(path)
        return None if found is None or found[1].unreadable else found[1].digest.hex()

    def write(self, path: str, data: bytes) -> None:
        self._written(path).write(path, data)
        with self._lock:
            self._changes[path] = _Change(True)

    def delete(self, path: str) -> None:
        self.stat(path)
        # It is gone already where somebody deleted the file itself; what is left to do is to stop serving it.
        with suppress(MissingFileError):
            self._written(path).delete(path)
        with self._lock:
            self._changes[path] = _Change(False)

    def refresh(self) -> Refreshed:
        """Stage what changed in the source since. Views and handles given out before keep showing what they showed."""
        if self._restager is None:
            raise StagingError("only the process that staged the data can refresh it")
        with self._refreshing:
            return self._refresh(self._restager)

    def _refresh(self, restager: Restager) -> Refreshed:
        staged, before = self._entries(), self._snapshot()
        listing = restager.survey()
        added = tuple(path for path in listing.files if path not in staged)
        changed = tuple(
            path
            for path, facts in listing.files.items()
            if path in staged and (path in before or staged[path].unreadable or facts != _facts(staged[path]))
        )
        removed = tuple(path for path in staged if path not in listing.files)
        segments: Sequence[Segment] = ()
        report = None
        if added or changed or removed:
            fresh = replace(listing, files={path: listing.files[path] for path in sorted((*added, *changed))})
            segments, report = restager.stage(fresh, removed=removed, already=self.stored)
        with self._lock:
            self._segments.extend(segments)
            self._left_out, self._unselected = listing.left_out, listing.unselected
            for path in (*added, *changed, *removed):
                if self._changes.get(path) is before.get(path):  # else it was written again in the meantime
                    self._changes.pop(path, None)
        if self._closed:
            self.close()  # while we were staging
        return Refreshed(added, changed, removed, report)

    def handle(self) -> StagedHandle:
        """What another process of this machine needs to map the same pages, for as long as this backend is open."""
        self._check_open()
        changes = self._snapshot()
        return StagedHandle(
            pid=os.getpid(),
            started=own_start(),
            root=self._root,
            source=_source_handle(self._source),
            segments=tuple(segment.handle() for segment in self._segments),
            written=tuple(path for path, change in changes.items() if change.present),
            removed=tuple(path for path, change in changes.items() if not change.present),
            left_out=self._left_out,
        )

    def descriptors(self) -> Sequence[int]:
        """One for each segment of `handle`, to be handed over a socket."""
        return [segment.fileno() for segment in self._segments]

    def keep(self, companion: Closable) -> None:
        """Close something together with this backend."""
        self._companions.append(companion)

    def close(self) -> None:
        """Give the memory back, as soon as no other process and no view uses it."""
        with self._lock:
            self._closed = True
        for part in (*self._companions, *self._segments):
            part.close()

    def _find(self, path: str) -> tuple[Segment, Entry] | None:
        """The staged file, or None where the source has a newer one."""
        checked(path, self._root)
        self._check_open()
        with self._lock:
            change = self._changes.get(path)
            segments = self._segments[::-1]
        if change is not None and change.present:
            return None
        for segment in segments if change is None else ():
            entry = segment.find(path)
            if entry is not None and not entry.removed:
                return segment, entry
            if entry is not None:
                break
        raise MissingFileError(f"{path} is not among the staged files of {self._root}")

    def _entries(self) -> dict[str, Entry]:
        self._check_open()
        merged = {entry.path: entry for segment in [*self._segments] for entry in segment}
        return {path: entry for path, entry in merged.items() if not entry.removed}

    def _snapshot(self) -> dict[str, _Change]:
        with self._lock:
            return dict(self._changes)

    def _written(self, path: str) -> Backend:
        checked(path, self._root)
        self._check_open()
        if self._source is None:
            raise StagingError(f"{path}: this process attached to staged data without its source {self._root}")
        return self._source

    def _check_open(self) -> None:
        if self._closed:
            raise StagingError(f"the staged data of {self._root} has been closed")


def attach(
    handle: StagedHandle, open_source: Callable[[SourceHandle], Backend], files: Sequence[io.FileIO] | None = None
) -> InMemoryBackend:
    """Map what another process has staged. `files` are its descriptors where they came over a socket."""
    found = files if files is not None else _descriptors_of(handle)
    segments: list[Segment] = []
    try:
        for expected, file in zip(handle.segments, found, strict=True):
            segments.append(_attached(expected, file))
        source = open_source(handle.source) if handle.source is not None else None
    except BaseException:
        opened: list[Closable] = [*segments, *found]
        for part in opened:
            part.close()
        raise
    return InMemoryBackend(
        segments,
        root=handle.root,
        source=source,
        written=handle.written,
        removed=handle.removed,
        left_out=handle.left_out,
    )


def _attached(expected: SegmentHandle, file: io.FileIO) -> Segment:
    segment = Segment(file)
    if (segment.identity, segment.size) != (expected.identity, expected.size):
        segment.close()
        raise StagingError("the descriptor leads to other staged data by now\n  try  ask for a new handle")
    return segment


def _descriptors_of(handle: StagedHandle) -> list[io.FileIO]:
    gone = f"the process that staged {handle.root} (pid {handle.pid}) has ended"
    if process_start(handle.pid) != handle.started:
        raise StagingError(f"{gone}\n  try  restart the run: it stages afresh")
    files: list[io.FileIO] = []
    try:
        for segment in handle.segments:
            path = f"/proc/{handle.pid}/fd/{segment.descriptor}"
            files.append(io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
            if os.fstat(files[-1].fileno()).st_ino != segment.inode:
                raise FileNotFoundError(errno.ENOENT, "closed, and the number means another file by now")
    except OSError as error:
        for file in files:
            file.close()
        reason = {errno.ENOENT: "it has closed it", errno.EACCES: "it runs as another user"}
        told = reason.get(error.errno or 0, error.strerror)
        raise StagingError(f"the data staged by process {handle.pid} cannot be reached: {told}") from error
    return files


def _facts(entry: Entry) -> FileStat:
    return FileStat(size=entry.size, modified_ns=entry.modified_ns)


def _source_handle(source: Backend | None) -> SourceHandle | None:
    return source.handle() if isinstance(source, LocalBackend | UrlBackend) else None
