"""Bytes of entries from shards: side by side where they lie side by side, checked, by several threads."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gracetune.cache.keys import Key
from gracetune.cache.manifest import Place, Runs, Table, join_keys
from gracetune.cache.shards import RUN, Layout, checksum
from gracetune.memory.weights.files import read_fully

MAX_OPEN = 64


@dataclass(frozen=True, eq=False)
class Located:
    """Where some entries lie, in the order in which they are read fastest.

    Columns, not objects: a cache has many entries. What is wanted entry by entry is made when it is asked for.
    """

    table: Table
    """Its `shard` and `layout` are numbers into the two below; `start` is the place in the file."""
    files: Sequence[str]
    kinds: Sequence[Layout]
    sizes: NDArray[np.int64]
    """Bytes of each entry: multiples of 64."""
    runs: Mapping[str, Runs]
    """Of the files: what can be checked at once."""

    def __len__(self) -> int:
        return len(self.table)

    def part(self, chosen: NDArray[np.bool_]) -> Located:
        return replace(self, table=self.table.rows(chosen), sizes=self.sizes[chosen])

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where in its file each entry begins."""
        return self.table.start.astype(np.int64)

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        return tuple(join_keys(self.table))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple([self.kinds[number] for number in self.table.layout.tolist()])

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """The name of each entry's file."""
        return tuple([self.files[number] for number in self.table.shard.tolist()])

    @cached_property
    def checksums(self) -> tuple[int, ...]:
        return tuple(self.table.checksum.tolist())

    @property
    def places(self) -> tuple[Place, ...]:
        """All of that entry by entry."""
        columns = (self.shards, self.layouts, self.starts.tolist(), self.checksums)
        return tuple(Place(*one) for one in zip(*columns, strict=True))


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


@dataclass(frozen=True)
class Job:
    """Entries that lie side by side, both in a file and in the slab: read at once."""

    first: int
    end: int
    checksum: int | None
    """Of all of them together; None where each has to be checked by itself."""


class Reading:
    """Some entries on their way into a slab: entry `i` of the plan to `offsets[i]`."""

    def __init__(self, files: OpenFiles, plan: Located, offsets: NDArray[np.int64], slab: memoryview) -> None:
        self.jobs = jobs(plan, offsets)
        self._files, self._plan, self._slab = files, plan, slab
        # Lists: single values come out of them many times as fast as out of arrays.
        self._begins, self._ends = offsets.tolist(), (offsets + plan.sizes).tolist()
        self._starts, self._shards = plan.starts.tolist(), plan.table.shard.tolist()

    def shard(self, job: Job) -> str:
        number: int = self._shards[job.first]
        return self._plan.files[number]

    def carry_out(self, job: Job) -> list[int]:
        """The numbers of entries that failed."""
        begin, end = self._begins[job.first], self._ends[job.end - 1]
        whole = self._slab[begin:end]
        try:
            file = self._files.get(self.shard(job))  # a name of its own: it keeps the file open while it is read
            got = read_fully(file.descriptor, whole, self._starts[job.first])
        except OSError:
            return [*range(job.first, job.end)]
        if job.checksum is not None and got == len(whole) and checksum(whole) == job.checksum:
            return []
        return [number for number in range(job.first, job.end) if not self._is_right(number, begin + got)]

    def _is_right(self, number: int, read_to: int) -> bool:
        begin, end = self._begins[number], self._ends[number]
        return end <= read_to and checksum(self._slab[begin:end]) == self._plan.checksums[number]


def jobs(plan: Located, offsets: NDArray[np.int64]) -> list[Job]:
    """Whole runs where all of one is wanted, and about as many bytes at once of everything else."""
    if not len(plan):
        return []
    shards = plan.table.shard
    joined = (plan.starts[:-1] + plan.sizes[:-1] == plan.starts[1:]) & (shards[:-1] == shards[1:])
    joined &= offsets[:-1] + plan.sizes[:-1] == offsets[1:]
    first, end, checksums = _whole_runs(plan, joined)
    begins, stops = np.zeros(len(plan) + 1, np.bool_), np.zeros(len(plan) + 1, np.bool_)
    begins[first] = stops[end] = True
    in_a_run = np.cumsum(begins.astype(np.int64) - stops) > 0
    full = np.diff(np.cumsum(plan.sizes) // RUN) != 0
    cut = ~joined | (begins | stops)[1:-1] | (full & ~in_a_run[:-2])
    cuts = [0, *(np.flatnonzero(cut) + 1).tolist(), len(plan)]
    known = dict(zip(first.tolist(), checksums.tolist(), strict=True))
    return [Job(begin, until, known.get(begin)) for begin, until in pairwise(cuts)]


def _whole_runs(
    plan: Located, joined: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    """First and end of every run all of which is in the plan, side by side in the slab too, and its checksum."""
    breaks = np.concatenate([[0], np.cumsum(~joined)])
    firsts, ends, checksums = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    numbers, begins = np.unique(plan.table.shard, return_index=True)
    for number, begin, until in zip(numbers, begins, [*begins[1:], len(plan)], strict=True):
        runs, starts = plan.runs[plan.files[number]], plan.starts[begin:until]
        first = begin + np.searchsorted(starts, runs.start.astype(np.int64))
        end = begin + np.searchsorted(starts, (runs.start + runs.size).astype(np.int64))
        some = end > first
        first, end, size, checksum_ = first[some], end[some], runs.size[some].astype(np.int64), runs.checksum[some]
        last = end - 1
        whole = plan.starts[last] + plan.sizes[last] - plan.starts[first] == size
        whole &= breaks[last] == breaks[first]
        firsts.append(first[whole])
        ends.append(end[whole])
        checksums.append(checksum_[whole])
    return np.concatenate(firsts), np.concatenate(ends), np.concatenate(checksums)


def read_place(files: OpenFiles, place: Place) -> NDArray[np.uint8] | None:
    """None where it is not what was written."""
    raw = np.empty(place.layout.size, np.uint8)
    try:
        file = files.get(place.shard)
        got = read_fully(file.descriptor, raw.data, place.start)
    except OSError:
        return None
    return raw if got == len(raw) and checksum(raw.data) == place.checksum else None
