"""Reads of entries from shards: adjacent entries in one system call, verified, by several threads."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gracetune.cache.keys import Key
from gracetune.cache.manifest import EntryCopy, EntryTable, Runs, join_keys
from gracetune.cache.shards import RUN, EntryLayout, checksum
from gracetune.storage.safetensors_headers import read_fully

MAX_OPEN = 64
STRETCH = 8
"""Consecutive jobs that one thread takes at a time. The kernel zeroes fresh memory in huge pages of 2 MiB. Two threads
that touch the same page would both zero it, which takes about as long as reading the data."""
_OFFSET_BITS: Final = np.uint64(40)
"""A shard is smaller than 1 TiB, so its number and an offset fit one 64-bit integer that can be sorted and searched."""


@dataclass(frozen=True, eq=False)
class LocatedEntries:
    """Locations of entries, in the order that reads fastest: by shard, then by offset.

    A cache may have a million entries, so this holds columns. The lists `keys` and `layouts` are created on demand.
    """

    table: EntryTable
    """`shard` and `layout` are indices into `files` and `kinds`; `start` is the offset in the file."""
    by_key: NDArray[np.intp]
    """Row numbers of `table`, sorted by key."""
    files: Sequence[str]
    kinds: Sequence[EntryLayout]
    sizes: NDArray[np.int64]
    """Bytes of each entry, multiples of 64."""
    runs: Mapping[str, Runs]
    """Runs by file name."""

    @classmethod
    def of(
        cls, table: EntryTable, files: Sequence[str], kinds: Sequence[EntryLayout], runs: Mapping[str, Runs]
    ) -> LocatedEntries:
        """Create the plan from a table that is sorted by key."""
        order = np.argsort(_positions(table.shard, table.start))
        by_key = np.empty(len(order), np.intp)
        by_key[order] = np.arange(len(order))
        sizes = np.array([layout.size for layout in kinds] or [0], np.int64)
        table = table.rows(order)
        return cls(table, by_key, files, kinds, sizes[table.layout], runs)

    def __len__(self) -> int:
        return len(self.table)

    def part(self, chosen: NDArray[np.bool_]) -> LocatedEntries:
        """The entries that the mask selects."""
        new_row = np.cumsum(chosen) - 1  # of each chosen old row
        by_key = new_row[self.by_key[chosen[self.by_key]]]
        return replace(self, table=self.table.rows(chosen), by_key=by_key, sizes=self.sizes[chosen])

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        return tuple(join_keys(self.table))

    @cached_property
    def layouts(self) -> tuple[EntryLayout, ...]:
        return tuple([self.kinds[number] for number in self.table.layout.tolist()])


class _File:
    """An open shard. Garbage collection closes it, so a thread that still reads from it keeps its descriptor."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if "descriptor" in self.__dict__:
            os.close(self.descriptor)


class OpenFiles:
    """The most recently used shards, kept open. Opening costs a round trip on a network disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> _File:
        with self._lock:
            file = self._files.pop(name, None)
            if file is None:
                file = _File(self._folder / name)
            self._files[name] = file
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)
            return file

    def close(self) -> None:
        with self._lock:
            self._files.clear()


class PageCache:
    """Drops a file from the kernel's page cache after the last job that reads it."""

    def __init__(self, files: OpenFiles, shards: Iterable[str]) -> None:
        """`shards` has the file of each job."""
        self._files = files
        self._left = Counter(shards)
        self._lock = threading.Lock()

    def finish_job(self, shard: str) -> None:
        """Count one finished job of this shard. After the last one, drop the file's pages."""
        with self._lock:
            self._left[shard] -= 1
            is_last = not self._left[shard]
        if is_last:
            with suppress(OSError):  # the file was removed, so its pages were dropped too
                file = self._files.get(shard)
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class ReadJob(NamedTuple):
    """One read: entries that are adjacent in a file and in the slab."""

    first: int
    end: int
    """Entries `first` to `end - 1` of the plan."""
    shard: int
    """Position in the plan's `files`."""
    start: int
    """Offset in the file."""
    begin: int
    """Offset in the slab."""
    size: int
    """In bytes."""
    checksum: int | None
    """Checksum of all bytes, if the job is a complete run. None: verify each entry separately."""


class EntryRead:
    """A bulk read of a plan's entries into a slab: entry `i` goes to `offsets[i]`."""

    def __init__(self, files: OpenFiles, plan: LocatedEntries, offsets: NDArray[np.int64], slab: memoryview) -> None:
        self.jobs = jobs(plan, offsets)
        self._files, self._plan, self._offsets, self._slab = files, plan, offsets, slab

    def shard(self, job: ReadJob) -> str:
        return self._plan.files[job.shard]

    def carry_out(self, job: ReadJob) -> list[int]:
        """Read and verify one job. Returns the plan indices of entries that failed."""
        target = self._slab[job.begin : job.begin + job.size]
        try:
            file = self._files.get(self.shard(job))  # this reference keeps the descriptor open during the read
            got = read_fully(file.descriptor, target, job.start)
        except OSError:
            return [*range(job.first, job.end)]
        if got == job.size and job.checksum is not None and checksum(target) == job.checksum:
            return []
        return [at for at in range(job.first, job.end) if not self._is_valid(at, job.begin + got)]

    def _is_valid(self, at: int, read_to: int) -> bool:
        begin = int(self._offsets[at])
        end = begin + int(self._plan.sizes[at])
        return end <= read_to and checksum(self._slab[begin:end]) == int(self._plan.table.checksum[at])


def stretches(some: Sequence[ReadJob], threads: int) -> deque[Sequence[ReadJob]]:
    """Group jobs into the portions that a thread takes at a time: at least four per thread, to balance the load."""
    each = max(1, min(STRETCH, len(some) // (4 * threads)))
    return deque(some[at : at + each] for at in range(0, len(some), each))


def jobs(plan: LocatedEntries, offsets: NDArray[np.int64]) -> list[ReadJob]:
    """Divide a plan into reads: one per complete run, and about `RUN` bytes each for all other entries."""
    if not len(plan):
        return []
    ends, positions = offsets + plan.sizes, _positions(plan.table.shard, plan.table.start)
    # joined[i]: entries i and i + 1 are adjacent in the file and in the slab.
    joined = (positions[:-1] + plan.sizes[:-1].astype(np.uint64) == positions[1:]) & (ends[:-1] == offsets[1:])
    first, end, checksums = _whole_runs(plan, positions, joined)
    begins, stops = np.zeros(len(plan) + 1, np.bool_), np.zeros(len(plan) + 1, np.bool_)
    begins[first] = stops[end] = True
    in_a_run = np.cumsum(begins.astype(np.int64) - stops) > 0
    crosses_limit = np.diff(np.cumsum(plan.sizes) // RUN) != 0
    # cut[i]: a job ends after entry i. Outside of runs that also happens whenever another `RUN` bytes are complete.
    cut = ~joined | (begins | stops)[1:-1] | (crosses_limit & ~in_a_run[:-2])
    firsts = np.concatenate([[0], np.flatnonzero(cut) + 1])
    lasts = np.concatenate([firsts[1:], [len(plan)]]) - 1
    starts, begins_at = plan.table.start[firsts], offsets[firsts]
    columns = (firsts, lasts + 1, plan.table.shard[firsts], starts, begins_at, ends[lasts] - begins_at)
    # Convert to Python lists once: single values come out of them many times faster than out of arrays.
    lists = [column.tolist() for column in columns]
    run_checksums = dict(zip(first.tolist(), checksums.tolist(), strict=True))
    return [*map(ReadJob._make, zip(*lists, map(run_checksums.get, lists[0]), strict=True))]


def _positions(shard: NDArray[np.uint32], start: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Shard number and offset as one integer that sorts by both."""
    return (shard.astype(np.uint64) << _OFFSET_BITS) + start


def _whole_runs(
    plan: LocatedEntries, positions: NDArray[np.uint64], joined: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.uint64]]:
    """First entry, end and checksum of each run that is completely in the plan and contiguous in the slab."""
    shards = plan.table.shard
    numbers = shards[np.concatenate([[True], shards[1:] != shards[:-1]])]
    runs = [plan.runs[plan.files[number]] for number in numbers.tolist()]
    start, size, checksums = (
        np.concatenate(columns) for columns in zip(*((one.start, one.size, one.checksum) for one in runs), strict=True)
    )
    start = _positions(np.repeat(numbers, [len(one.start) for one in runs]), start)
    first, end = np.searchsorted(positions, start), np.searchsorted(positions, start + size)
    in_plan = end > first
    first, end, size, checksums = first[in_plan], end[in_plan], size[in_plan], checksums[in_plan]
    # A run is complete if its bytes add up and no gap (counted cumulatively in `breaks`) lies inside.
    last, breaks = end - 1, np.concatenate([[0], np.cumsum(~joined)])
    whole = (positions[last] + plan.sizes[last].astype(np.uint64) - positions[first] == size) & (
        breaks[last] == breaks[first]
    )
    return first[whole], end[whole], checksums[whole]


def read_entry_copy(files: OpenFiles, copy: EntryCopy) -> NDArray[np.uint8] | None:
    """Read one entry. Returns None if it is unreadable or does not match its checksum."""
    raw = np.empty(copy.layout.size, np.uint8)
    try:
        file = files.get(copy.shard)
        got = read_fully(file.descriptor, raw.data, copy.start)
    except OSError:
        return None
    return raw if got == len(raw) and checksum(raw.data) == copy.checksum else None
