"""Bytes of entries from shards: side by side where they lie side by side, checked, by several threads."""

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
from gracetune.cache.manifest import Place, Runs, Table, join_keys
from gracetune.cache.shards import RUN, Layout, checksum
from gracetune.storage.safetensors_headers import read_fully

MAX_OPEN = 64
STRETCH = 8
"""Jobs in a row for one thread. Fresh memory comes in pages of 2 MiB: two threads inside one would both fill it with
zeros, and that takes about as long as reading it."""
_LONGEST: Final = np.uint64(40)
"""Bits: no shard is a TiB long, so its number and a place in it are one number: one sort, one search."""


@dataclass(frozen=True, eq=False)
class Located:
    """Where some entries lie, in the order in which they are read fastest.

    Columns, not objects: a cache has many entries. What is wanted entry by entry is made when it is asked for.
    """

    table: Table
    """Its `shard` and `layout` are numbers into the two below; `start` is the place in the file."""
    by_key: NDArray[np.intp]
    """Its rows, sorted by key."""
    files: Sequence[str]
    kinds: Sequence[Layout]
    sizes: NDArray[np.int64]
    """Bytes of each entry: multiples of 64."""
    runs: Mapping[str, Runs]
    """Of the files: what can be checked at once."""

    @classmethod
    def of(cls, table: Table, files: Sequence[str], kinds: Sequence[Layout], runs: Mapping[str, Runs]) -> Located:
        """`table` is sorted by key."""
        order = np.argsort(_positions(table.shard, table.start))
        by_key = np.empty(len(order), np.intp)
        by_key[order] = np.arange(len(order))
        sizes = np.array([layout.size for layout in kinds] or [0], np.int64)
        table = table.rows(order)
        return cls(table, by_key, files, kinds, sizes[table.layout], runs)

    def __len__(self) -> int:
        return len(self.table)

    def part(self, chosen: NDArray[np.bool_]) -> Located:
        number = np.cumsum(chosen) - 1
        by_key = number[self.by_key[chosen[self.by_key]]]
        return replace(self, table=self.table.rows(chosen), by_key=by_key, sizes=self.sizes[chosen])

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        return tuple(join_keys(self.table))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple([self.kinds[number] for number in self.table.layout.tolist()])


class _File:
    """An open shard; closed when nobody reads from it any more, so that no reader loses its descriptor."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if "descriptor" in self.__dict__:
            os.close(self.descriptor)


class OpenFiles:
    """The files used last: opening costs a round trip on network disks, and the number of open files is limited."""

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
    """Lets go of a file's pages when the last of its jobs is done; `shards` names each job's file."""

    def __init__(self, files: OpenFiles, shards: Iterable[str]) -> None:
        self._files = files
        self._left = Counter(shards)
        self._lock = threading.Lock()

    def read(self, shard: str) -> None:
        with self._lock:
            self._left[shard] -= 1
            is_last = not self._left[shard]
        if is_last:
            with suppress(OSError):  # gone meanwhile, and its pages with it
                file = self._files.get(shard)
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class Job(NamedTuple):
    """Entries that lie side by side, both in a file and in the slab: read at once."""

    first: int
    end: int
    """The plan's numbers."""
    shard: int
    start: int
    """In the file."""
    begin: int
    """In the slab."""
    size: int
    checksum: int | None
    """Of all of them together; None where each has to be checked by itself."""


class Reading:
    """Some entries on their way into a slab: entry `i` of the plan to `offsets[i]`."""

    def __init__(self, files: OpenFiles, plan: Located, offsets: NDArray[np.int64], slab: memoryview) -> None:
        self.jobs = jobs(plan, offsets)
        self._files, self._plan, self._offsets, self._slab = files, plan, offsets, slab

    def shard(self, job: Job) -> str:
        return self._plan.files[job.shard]

    def carry_out(self, job: Job) -> list[int]:
        """The numbers of entries that failed."""
        whole = self._slab[job.begin : job.begin + job.size]
        try:
            file = self._files.get(self.shard(job))  # a name of its own: it keeps the file open while it is read
            got = read_fully(file.descriptor, whole, job.start)
        except OSError:
            return [*range(job.first, job.end)]
        if got == job.size and job.checksum is not None and checksum(whole) == job.checksum:
            return []
        return [number for number in range(job.first, job.end) if not self._is_right(number, job.begin + got)]

    def _is_right(self, number: int, read_to: int) -> bool:
        begin = int(self._offsets[number])
        end = begin + int(self._plan.sizes[number])
        return end <= read_to and checksum(self._slab[begin:end]) == int(self._plan.table.checksum[number])


def stretches(some: Sequence[Job], threads: int) -> deque[Sequence[Job]]:
    """What a thread takes at once; less where there is little, so that all have something to do."""
    each = max(1, min(STRETCH, len(some) // (4 * threads)))
    return deque(some[at : at + each] for at in range(0, len(some), each))


def jobs(plan: Located, offsets: NDArray[np.int64]) -> list[Job]:
    """Whole runs where all of one is wanted, and about as many bytes at once of everything else."""
    if not len(plan):
        return []
    ends, positions = offsets + plan.sizes, _positions(plan.table.shard, plan.table.start)
    joined = (positions[:-1] + plan.sizes[:-1].astype(np.uint64) == positions[1:]) & (ends[:-1] == offsets[1:])
    first, end, checksums = _whole_runs(plan, positions, joined)
    begins, stops = np.zeros(len(plan) + 1, np.bool_), np.zeros(len(plan) + 1, np.bool_)
    begins[first] = stops[end] = True
    in_a_run = np.cumsum(begins.astype(np.int64) - stops) > 0
    full = np.diff(np.cumsum(plan.sizes) // RUN) != 0
    cut = ~joined | (begins | stops)[1:-1] | (full & ~in_a_run[:-2])
    firsts = np.concatenate([[0], np.flatnonzero(cut) + 1])
    lasts = np.concatenate([firsts[1:], [len(plan)]]) - 1
    starts, begins_at = plan.table.start[firsts], offsets[firsts]
    columns = (firsts, lasts + 1, plan.table.shard[firsts], starts, begins_at, ends[lasts] - begins_at)
    # Plain numbers, and only of the jobs: they come out of lists many times as fast as out of arrays.
    numbers = [column.tolist() for column in columns]
    known = dict(zip(first.tolist(), checksums.tolist(), strict=True))
    return [*map(Job._make, zip(*numbers, map(known.get, numbers[0]), strict=True))]


def _positions(shard: NDArray[np.uint32], start: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (shard.astype(np.uint64) << _LONGEST) + start


def _whole_runs(
    plan: Located, positions: NDArray[np.uint64], joined: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.uint64]]:
    """First and end of every run all of which is in the plan, side by side in the slab too, and its checksum."""
    shards = plan.table.shard
    numbers = shards[np.concatenate([[True], shards[1:] != shards[:-1]])]
    runs = [plan.runs[plan.files[number]] for number in numbers.tolist()]
    start, size, checksums = (
        np.concatenate(columns) for columns in zip(*((one.start, one.size, one.checksum) for one in runs), strict=True)
    )
    start = _positions(np.repeat(numbers, [len(one.start) for one in runs]), start)
    first, end = np.searchsorted(positions, start), np.searchsorted(positions, start + size)
    some = end > first
    first, end, size, checksums = first[some], end[some], size[some], checksums[some]
    last, breaks = end - 1, np.concatenate([[0], np.cumsum(~joined)])
    whole = (positions[last] + plan.sizes[last].astype(np.uint64) - positions[first] == size) & (
        breaks[last] == breaks[first]
    )
    return first[whole], end[whole], checksums[whole]


def read_place(files: OpenFiles, place: Place) -> NDArray[np.uint8] | None:
    """None where it is not what was written."""
    raw = np.empty(place.layout.size, np.uint8)
    try:
        file = files.get(place.shard)
        got = read_fully(file.descriptor, raw.data, place.start)
    except OSError:
        return None
    return raw if got == len(raw) and checksum(raw.data) == place.checksum else None
