"""Copying a dataset's files into sealed segments, in parallel.

Small files (up to one chunk) are read whole, compressed and stored one after the other. For a large file, space of its
full size is reserved and written chunk by chunk. If compression makes it shorter, the rest of the space stays a hole,
which uses no memory. A thread thus holds a single chunk in memory, whatever the size of the file.

The kernel serializes writes to a memory file. With one file for all threads, staging would be a third slower on two
cores and no faster on seventy, so the threads are spread over several segments.

For a file that cannot be read, the reason is staged instead, and reading it raises the error that its own storage would
have raised. Callers who know which files are samples decide whether too many are unreadable.
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

from gracetune.data.backend import Backend, FileStat, LeftOut, Listing
from gracetune.data.errors import DataError, MissingFileError, UnreadableMediaError
from gracetune.data.staging.memory import StagingEstimate, StagingMemoryGuard, estimate_stored
from gracetune.data.staging.report import OnProgress, StagingProgress, StagingReport, unwatched
from gracetune.hostmem.compression import CHUNK, CHUNK_OVERHEAD, RAW, Compression, CompressionCodec, codec_for, shrinks
from gracetune.hostmem.hint import together
from gracetune.hostmem.numa import NodeChoice
from gracetune.hostmem.segment import UNREADABLE, Segment, SegmentEntry, SegmentWriter, capacity_for
from gracetune.units import MIB

MOST_THREADS: Final = 72
MOST_SEGMENTS: Final = 8
SEGMENT_BYTES: Final = 32 * MIB
"""The minimum size that is worth a segment of its own."""
ATTEMPTS: Final = 3
"""How often a file is read that changes while it is read."""
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


def stage_files(
    source: Backend,
    listing: Listing,
    options: StagingOptions,
    *,
    guard: StagingMemoryGuard,
    choice: NodeChoice,
    on_progress: OnProgress = unwatched,
) -> tuple[list[Segment], StagingReport]:
    """Copy all files of `listing` into memory. If this raises, all memory and descriptors are released."""
    codec = codec_for(options.compression)
    estimate = estimate_stored(source, listing.files, codec)
    unchecked = guard.check(estimate)
    started = time.perf_counter()
    with ExitStack() as stack:
        capacity = capacity_for(facts.size for facts in listing.files.values())
        open_segments = [
            _OpenSegment(stack.enter_context(SegmentWriter(capacity, choice)))
            for _ in range(segments_for(estimate.raw, options.threads))
        ]
        run = _Run(source, guard, codec, options, listing.files)
        unreadable = run.fill(open_segments, on_progress)
        segments = _sealed(open_segments)
    report = _report(options, open_segments, estimate, unreadable, listing, time.perf_counter() - started, unchecked)
    return segments, report


@dataclass(frozen=True)
class _OpenSegment:
    """A segment that is being filled, and its entries so far."""

    writer: SegmentWriter
    entries: list[SegmentEntry] = field(default_factory=list)


def _sealed(open_segments: list[_OpenSegment]) -> list[Segment]:
    with ExitStack() as stack:
        segments = []
        for filled in open_segments:
            segment = Segment(filled.writer.finish(filled.entries))
            stack.callback(segment.close)
            segments.append(segment)
        stack.pop_all()  # all succeeded: leave the segments open
        return segments


def _report(
    options: StagingOptions,
    open_segments: list[_OpenSegment],
    estimate: StagingEstimate,
    unreadable: tuple[LeftOut, ...],
    listing: Listing,
    seconds: float,
    unchecked: str | None,
) -> StagingReport:
    staged = [entry for segment in open_segments for entry in segment.entries if not entry.unreadable]
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
        numa=together(segment.writer.numa for segment in open_segments),
        notes=() if unchecked is None else (unchecked,),
    )


class _StoppedError(DataError):
    """Another thread has failed. This never leaves the module."""


class _Run:
    """The state shared by all threads: the queue of files, the unreadable ones, and the progress."""

    def __init__(
        self,
        source: Backend,
        guard: StagingMemoryGuard,
        codec: CompressionCodec | None,
        options: StagingOptions,
        files: Mapping[str, FileStat],
    ) -> None:
        self.source, self.guard, self.codec = source, guard, codec
        self._options = options
        self._files, self._bytes = len(files), sum(facts.size for facts in files.values())
        # Largest files first: a long video started last would keep one thread busy while all others wait.
        self._queue = iter(sorted(files.items(), key=lambda item: (-item[1].size, item[0])))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = self._read = 0
        self._unreadable: list[LeftOut] = []

    def fill(self, open_segments: list[_OpenSegment], on_progress: OnProgress) -> tuple[LeftOut, ...]:
        """Run the threads until all files are stored. Returns the unreadable files."""
        started = time.perf_counter()

        def report() -> None:
            seconds = time.perf_counter() - started
            on_progress(
                StagingProgress(
                    files=self._done, files_total=self._files, read=self._read, total=self._bytes,
                    stored=self.guard.used, seconds=seconds,
                )
            )  # fmt: skip

        count = self._options.threads
        with ThreadPoolExecutor(count, thread_name_prefix="gracetune-staging") as pool:
            try:
                workers = [_Worker(self, open_segments[number % len(open_segments)]) for number in range(count)]
                _wait([pool.submit(worker.run) for worker in workers], report)
            finally:
                self._stop.set()
        report()
        return tuple(sorted(self._unreadable, key=lambda item: item.path))

    def next_file(self) -> tuple[str, FileStat] | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._queue, None)

    def advance(self, *, read: int = 0, done: int = 0) -> None:
        """Record a thread's progress. Raises _StoppedError if the thread should stop."""
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
    """One thread, with a buffer of one chunk and the segment it writes to."""

    def __init__(self, run: _Run, segment: _OpenSegment) -> None:
        self._run, self._segment = run, segment
        self._buffer = memoryview(bytearray(CHUNK))

    def run(self) -> None:
        """Store one file after another until none is left or another thread fails."""
        while (following := self._run.next_file()) is not None:
            path, facts = following
            try:
                self._segment.entries.append(self._stage_file(path, facts))
                self._run.advance(done=1)
            except _StoppedError:
                return
            except UnreadableMediaError as error:
                self._segment.entries.append(self._reason(path, facts, error.reason))
                self._run.unreadable(path, error.reason)

    def _reason(self, path: str, facts: FileStat, reason: str) -> SegmentEntry:
        """Store the reason in place of an unreadable file."""
        text = reason.encode(errors="backslashreplace")
        offset = self._segment.writer.reserve(len(text))
        stored = self._write_all(offset, [text])
        return SegmentEntry(
            path, UNREADABLE, offset=offset, stored=stored, size=facts.size, modified_ns=facts.modified_ns,
            digest=bytes(16),
        )  # fmt: skip

    def _stage_file(self, path: str, facts: FileStat) -> SegmentEntry:
        source = self._run.source
        for _ in range(ATTEMPTS):
            try:
                with source.open(path) as stream:
                    # The streams of backends come from the io module, so they all have `readinto`.
                    entry = self._store(path, facts, cast("io.BufferedIOBase", stream))
                now = source.stat(path)
            except MissingFileError as error:
                raise UnreadableMediaError(path, "it was removed while the dataset was being staged") from error
            except OSError as error:
                raise UnreadableMediaError(path, f"{error.strerror or error}") from error
            if now == facts and entry.size == facts.size:
                return entry
            self._forget(entry.offset, entry.stored)
            facts = now
        raise UnreadableMediaError(path, f"it kept changing while it was read ({ATTEMPTS} times)")

    def _store(self, path: str, facts: FileStat, stream: io.BufferedIOBase) -> SegmentEntry:
        """Store the stream, up to the expected size. The entry's `size` is one larger if the stream has more bytes."""
        digest = xxhash.xxh3_128()
        chunks = self._chunks(stream, facts.size, digest)
        codec, first = self._decided(next(chunks, memoryview(b"")))
        if facts.size <= CHUNK:
            offset = self._segment.writer.reserve(len(first))
            stored = self._write_all(offset, [first])
        else:
            offset = self._segment.writer.reserve(facts.size + -(-facts.size // CHUNK) * CHUNK_OVERHEAD)
            pack = codec.pack if codec is not None else memoryview
            stored = self._write_all(offset, chain([first], map(pack, chunks)))
        return SegmentEntry(
            path=path,
            codec=RAW if codec is None else codec.number,
            offset=offset,
            stored=stored,
            size=stream.tell() + len(stream.read(1)),
            modified_ns=facts.modified_ns,
            digest=digest.digest(),
        )

    def _decided(self, first: memoryview) -> tuple[CompressionCodec | None, bytes | memoryview]:
        """Decide by the first chunk whether to compress the file. Returns the codec and the chunk in stored form."""
        codec = self._run.codec
        if codec is not None and first:
            packed = codec.pack(first)
            if shrinks(len(packed), len(first)):
                return codec, packed
        return None, first

    def _write_all(self, offset: int, chunks: Iterable[bytes | memoryview]) -> int:
        stored = 0
        try:
            for chunk in chunks:
                self._run.guard.take(len(chunk))
                stored += len(chunk)
                self._segment.writer.write(offset + stored - len(chunk), chunk)
        except BaseException:
            self._forget(offset, stored)
            raise
        return stored

    def _chunks(self, stream: io.BufferedIOBase, size: int, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
        """Yield up to `size` bytes in chunks. All share one buffer, so a chunk is valid only until the next.

        A stream may return less than requested, so each chunk is filled in a loop.
        """
        left = size
        while left > 0:
            room = self._buffer[: min(left, CHUNK)]
            done = 0
            while done < len(room) and (count := stream.readinto(room[done:])):
                done += count
            if not done:
                return
            digest.update(room[:done])
            self._run.advance(read=done)
            left -= done
            yield room[:done]

    def _forget(self, offset: int, stored: int) -> None:
        """Release the memory of a file that is not kept."""
        self._segment.writer.discard(offset, stored)
        self._run.guard.give_back(stored)


def _wait(threads: list[Future[None]], report: Callable[[], None]) -> None:
    """Wait until all threads have finished. If one fails, raise its error at once."""
    pending = set(threads)
    while pending:
        done, pending = wait(pending, timeout=_PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
        for thread in done:
            thread.result()
        report()
