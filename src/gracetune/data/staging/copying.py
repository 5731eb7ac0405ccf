"""Reading a dataset's files into sealed segments, in parallel.

Small files (up to one chunk) are read whole, packed and placed one after the other. Large ones get a place as long as
the file and are written chunk by chunk; where compression makes them shorter, the rest of the place stays a hole that
takes no memory. So a thread holds one chunk at a time, whatever the size of the file.

The kernel lets one thread at a time write to a memory file. With one file for all threads staging would be a third
slower on two cores, and no faster on seventy; so the threads are spread over a few segments.

A file that cannot be read is staged as the reason why, which everybody who asks for it is told, as its own storage
would have done. How many of them are too many is decided by those who know which files are samples.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, cast

import xxhash

from gracetune.data.backend import Backend, FileStat
from gracetune.data.backends.listing import LeftOut, Listing
from gracetune.data.errors import DataError, MissingFileError, UnreadableMediaError
from gracetune.data.staging.estimate import Estimate, estimate_stored
from gracetune.data.staging.guard import MemoryGuard
from gracetune.data.staging.progress import OnProgress, StagingProgress, unwatched
from gracetune.data.staging.report import StagingReport
from gracetune.hostmem.compression import CHUNK, CHUNK_OVERHEAD, RAW, Codec, Compression, codec_for, shrinks
from gracetune.hostmem.hint import together
from gracetune.hostmem.numa import NodeChoice
from gracetune.hostmem.segment import Segment
from gracetune.hostmem.segment_writer import UNREADABLE, ArenaWriter, Entry, capacity_for
from gracetune.units import MIB

MOST_THREADS: Final = 72
MOST_SEGMENTS: Final = 8
SEGMENT_BYTES: Final = 32 * MIB
"""Less than that is not worth a segment of its own."""
ATTEMPTS: Final = 3
"""A file that changes while it is read is read again, but not for ever."""
_PROGRESS_SECONDS: Final = 0.1


@dataclass(frozen=True)
class StagingOptions:
    dataset: str
    compression: Compression = "none"
    threads: int = 1


def default_threads(cpus: int | None) -> int:
    return max(1, min(MOST_THREADS, cpus or 1))


def segments_for(size: int, threads: int) -> int:
    return max(1, min(threads, MOST_SEGMENTS, size // SEGMENT_BYTES))


def stage(
    source: Backend,
    listing: Listing,
    options: StagingOptions,
    *,
    guard: MemoryGuard,
    choice: NodeChoice,
    on_progress: OnProgress = unwatched,
) -> tuple[list[Segment], StagingReport]:
    """All files of `listing` in memory. Whatever goes wrong, no memory and no descriptor stays behind."""
    codec = codec_for(options.compression)
    estimate = estimate_stored(source, listing.files, codec)
    unchecked = guard.check(estimate)
    started = time.perf_counter()
    with ExitStack() as stack:
        capacity = capacity_for(facts.size for facts in listing.files.values())
        shelves = [
            _Shelf(stack.enter_context(ArenaWriter(capacity, choice)))
            for _ in range(segments_for(estimate.raw, options.threads))
        ]
        run = _Run(source, guard, codec, options, listing.files)
        unreadable = run.fill(shelves, on_progress)
        segments = _sealed(shelves)
    report = _report(options, shelves, estimate, unreadable, listing, time.perf_counter() - started, unchecked)
    return segments, report


@dataclass(frozen=True)
class _Shelf:
    """A segment being filled, and what is in it so far."""

    writer: ArenaWriter
    entries: list[Entry] = field(default_factory=list)


def _sealed(shelves: list[_Shelf]) -> list[Segment]:
    with ExitStack() as stack:
        segments = []
        for shelf in shelves:
            segment = Segment(shelf.writer.finish(shelf.entries))
            stack.callback(segment.close)
            segments.append(segment)
        stack.pop_all()
        return segments


def _report(
    options: StagingOptions,
    shelves: list[_Shelf],
    estimate: Estimate,
    unreadable: tuple[LeftOut, ...],
    listing: Listing,
    seconds: float,
    unchecked: str | None,
) -> StagingReport:
    staged = [entry for shelf in shelves for entry in shelf.entries if not entry.unreadable]
    return StagingReport(
        dataset=options.dataset,
        files=len(staged),
        raw=sum(entry.size for entry in staged),
        stored=sum(entry.stored for entry in staged),
        compression=options.compression,
        compressed_files=sum(entry.codec != RAW for entry in staged),
        threads=options.threads,
        seconds=seconds,
        estimate=estimate,
        unreadable=unreadable,
        left_out=listing.left_out,
        unselected=listing.unselected,
        numa=together(shelf.writer.numa for shelf in shelves),
        notes=() if unchecked is None else (unchecked,),
    )


class _StoppedError(DataError):
    """Another thread has already failed; never seen outside."""


class _Run:
    """What the threads share: the files still to do, what went wrong, how far we are."""

    def __init__(
        self,
        source: Backend,
        guard: MemoryGuard,
        codec: Codec | None,
        options: StagingOptions,
        files: Mapping[str, FileStat],
    ) -> None:
        self.source, self.guard, self.codec = source, guard, codec
        self._options = options
        self._files, self._bytes = len(files), sum(facts.size for facts in files.values())
        # The largest first: a long video started last would keep one thread busy and all others waiting.
        self._queue = iter(sorted(files.items(), key=lambda item: (-item[1].size, item[0])))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = self._read = 0
        self._unreadable: list[LeftOut] = []

    def fill(self, shelves: list[_Shelf], on_progress: OnProgress) -> tuple[LeftOut, ...]:
        """Run the threads until all files are on a shelf. Returns those of which that is only the reason."""
        started = time.perf_counter()

        def report() -> None:
            seconds = time.perf_counter() - started
            on_progress(StagingProgress(self._done, self._files, self._read, self._bytes, self.guard.used, seconds))

        count = self._options.threads
        with ThreadPoolExecutor(count, thread_name_prefix="gracetune-staging") as pool:
            try:
                workers = [_Worker(self, shelves[number % len(shelves)]) for number in range(count)]
                _wait([pool.submit(worker.run) for worker in workers], report)
            finally:
                self._stop.set()
        report()
        return tuple(sorted(self._unreadable, key=lambda item: item.path))

    def next_file(self) -> tuple[str, FileStat] | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._queue, None)

    def went_on(self, *, read: int = 0, done: int = 0) -> None:
        """A thread reports progress, and learns here that it should stop."""
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self._read += read
            self._done += done

    def unreadable(self, path: str, reason: str) -> None:
        with self._lock:
            self._done += 1
            self._unreadable.append(LeftOut(path, reason))


class _Worker:
    """One thread: a chunk of memory, and the shelf it puts files on."""

    def __init__(self, run: _Run, shelf: _Shelf) -> None:
        self._run, self._shelf = run, shelf
        self._buffer = memoryview(bytearray(CHUNK))

    def run(self) -> None:
        """File after file until there are none, or somebody failed."""
        while (following := self._run.next_file()) is not None:
            path, facts = following
            try:
                self._shelf.entries.append(self._stage(path, facts))
                self._run.went_on(done=1)
            except _StoppedError:
                return
            except UnreadableMediaError as error:
                self._shelf.entries.append(self._reason(path, facts, error.reason))
                self._run.unreadable(path, error.reason)

    def _reason(self, path: str, facts: FileStat, reason: str) -> Entry:
        text = reason.encode(errors="backslashreplace")
        offset = self._shelf.writer.reserve(len(text))
        stored = self._write_all(offset, [text])
        return Entry(path, UNREADABLE, offset, stored, facts.size, facts.modified_ns, bytes(16))

    def _stage(self, path: str, facts: FileStat) -> Entry:
        source = self._run.source
        for _ in range(ATTEMPTS):
            try:
                with source.open(path) as stream:
                    # The contract's streams are the io module's, all of which can read into a buffer.
                    entry = self._store(path, facts, cast("io.BufferedIOBase", stream))
                now = source.stat(path)
            except MissingFileError as error:
                raise UnreadableMediaError(path, "it vanished while the dataset was being staged") from error
            except OSError as error:
                raise UnreadableMediaError(path, f"{error.strerror or error}") from error
            if now == facts and entry.size == facts.size:
                return entry
            self._forget(entry.offset, entry.stored)
            facts = now
        raise UnreadableMediaError(path, f"it kept changing while it was read ({ATTEMPTS} times)")

    def _store(self, path: str, facts: FileStat, stream: io.BufferedIOBase) -> Entry:
        """What the stream holds, up to the size we were told of; `size` is one more where there was more."""
        digest = xxhash.xxh3_128()
        chunks = self._chunks(stream, facts.size, digest)
        codec, first = self._decided(next(chunks, memoryview(b"")))
        if facts.size <= CHUNK:
            offset = self._shelf.writer.reserve(len(first))
            stored = self._write_all(offset, [first])
        else:
            offset = self._shelf.writer.reserve(facts.size + -(-facts.size // CHUNK) * CHUNK_OVERHEAD)
            pack = codec.pack if codec is not None else memoryview
            stored = self._write_all(offset, chain([first], map(pack, chunks)))
        return Entry(
            path=path,
            codec=RAW if codec is None else codec.number,
            offset=offset,
            stored=stored,
            size=stream.tell() + len(stream.read(1)),
            modified_ns=facts.modified_ns,
            digest=digest.digest(),
        )

    def _decided(self, first: memoryview) -> tuple[Codec | None, bytes | memoryview]:
        """The first chunk decides whether the file is compressed. Returns it in the form in which it is stored."""
        codec = self._run.codec
        if codec is not None and first:
            packed = codec.pack(first)
            if shrinks(len(packed), len(first)):
                return codec, packed
        return None, first

    def _write_all(self, offset: int, pieces: Iterable[bytes | memoryview]) -> int:
        stored = 0
        try:
            for piece in pieces:
                self._run.guard.take(len(piece))
                stored += len(piece)
                self._shelf.writer.write(offset + stored - len(piece), piece)
        except BaseException:
            self._forget(offset, stored)
            raise
        return stored

    def _chunks(self, stream: io.BufferedIOBase, size: int, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
        """Up to `size` bytes. Each chunk is good until the next; a stream may hand it out in smaller pieces."""
        left = size
        while left > 0:
            room = self._buffer[: min(left, CHUNK)]
            done = 0
            while done < len(room) and (count := stream.readinto(room[done:])):
                done += count
            if not done:
                return
            digest.update(room[:done])
            self._run.went_on(read=done)
            left -= done
            yield room[:done]

    def _forget(self, offset: int, stored: int) -> None:
        self._shelf.writer.discard(offset, stored)
        self._run.guard.give_back(stored)


def _wait(threads: list[Future[None]], report: Callable[[], None]) -> None:
    """Until all are done, or one has failed: then its error is raised here."""
    pending = set(threads)
    while pending:
        done, pending = wait(pending, timeout=_PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
        for thread in done:
            thread.result()
        report()
