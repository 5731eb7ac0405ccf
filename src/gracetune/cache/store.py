"""The disk store: entries by key, in shards that many processes add to at once.

    with DiskStore.open(folder, writable=True) as store:
        missing = store.find(keys).missing
        with store.writer() as writer:
            for origin, entry in encode(missing):
                writer.add(origin, entry)            # on disk, whole, at the latest at the writer's next flush
        entry = store.read(key)                      # dict of tensors

    plan = store.locate(keys)                        # the resident store: in the order the disk likes
    offsets = numpy.concatenate([[0], numpy.cumsum(plan.sizes)[:-1]])
    store.read_into(plan, slab, offsets)             # slab: a uint8 tensor in main memory
    entry = plan.layouts[i].views(slab[offsets[i] : offsets[i] + plan.sizes[i]])

Every writer makes files of its own, so nobody waits for anybody. One open store serves all threads of a process; a
process opens a folder once. Files are read with `pread`, not mapped: a file cut off under a map kills the process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gracetune.cache.errors import (
    CacheError,
    CacheFullError,
    CorruptEntryError,
    MissingEntryError,
    ReadOnlyCacheError,
    unreadable,
    unwritable,
)
from gracetune.cache.folder import INDEX_FILE, SHARDS, prepare, require
from gracetune.cache.keys import Key
from gracetune.cache.manifest import Catalogue, Place
from gracetune.cache.reading import Job, Located, OpenFiles, PageCache, Reading, read_place, stretches
from gracetune.cache.shards import (
    DamagedFileError,
    Layout,
    Packed,
    Shard,
    StoredEntry,
    is_shard,
    read_shard,
    write_shard,
)
from gracetune.cache.writer import Flush, Writer
from gracetune.errors import Problem
from gracetune.storage.atomic import sweep
from gracetune.storage.locks import lock, open_lock_file
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.cache.encoder import Entry

__all__ = ["DamagedShard", "DiskStore", "Flush", "Found", "Layout", "Located", "Writer"]

MAX_THREADS = 16
"""Enough for a fast disk or the memory bus; more would wait for each other in Python."""
_WORTH_INDEXING = 16
"""Reading this many headers takes about as long as writing the index."""


@dataclass(frozen=True)
class Found:
    present: tuple[Key, ...]
    missing: tuple[Key, ...]
    """Both in the order they were asked for."""


@dataclass(frozen=True)
class DamagedShard:
    """A file none of whose entries are used: its header or its length is not as it was written."""

    name: str
    size: int
    reason: str


class DiskStore:
    """Open one with `DiskStore.open`."""

    def __init__(self, folder: Path, catalogue: Catalogue, users: int | None, *, writable: bool) -> None:
        self.folder = folder
        self.writable = writable
        self.catalogue = catalogue
        """For this package's own modules, under `mutex`."""
        self.mutex = threading.RLock()
        self.before_writing: Callable[[Path, Collection[Key]], None] = lambda folder, keys: None
        """Called by writers with what they are about to add."""
        self.users = users
        """Descriptor of the lock that says the cache is in use; None where the folder cannot be locked."""
        self._damaged: dict[str, DamagedShard] = {}
        self._created: set[Key] = set()
        self._suspects: set[str] = set()
        self._files = OpenFiles(self.shards_folder)
        self._unindexed = 0

    @classmethod
    def open(cls, folder: Path, *, writable: bool) -> DiskStore:
        """Raises ForeignFolderError, ReadOnlyCacheError or CacheError; makes the folder where `writable` and absent."""
        folder = folder.absolute()
        if writable:
            prepare(folder)
        require(folder)
        try:
            users = _in_use(folder, writable=writable)
        except OSError as error:
            raise unwritable(error, folder, needed=0, free=None) from error
        store = cls(folder, _indexed(folder), users, writable=writable)
        try:
            store._begin()
        except OSError as error:
            store.close()
            raise unreadable(error, folder) from error
        except BaseException:
            store.close()
            raise
        return store

    def _begin(self) -> None:
        if self.writable:
            sweep(self.folder)
            sweep(self.shards_folder)
        self.refresh()
        if self.writable:
            self.save_index_if_worth_it()

    def close(self) -> None:
        with self.mutex:
            self._files.close()
            if self.users is not None:
                os.close(self.users)
                self.users = None

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def shards_folder(self) -> Path:
        return self.folder / SHARDS

    @property
    def has_index(self) -> bool:
        return (self.folder / INDEX_FILE).exists()

    @property
    def damaged(self) -> tuple[DamagedShard, ...]:
        """Files left out when the store was opened or refreshed."""
        with self.mutex:
            return tuple(self._damaged.values())

    @property
    def created(self) -> frozenset[Key]:
        """What writers of this store have flushed: all that `persistent_cache: false` may remove."""
        with self.mutex:
            return frozenset(self._created)

    # -- finding

    def __contains__(self, key: Key) -> bool:
        with self.mutex:
            return bool(self.catalogue.copies(key))

    def keys(self) -> list[Key]:
        """Every key, sorted."""
        with self.mutex:
            return self.catalogue.keys()

    def find(self, keys: Sequence[Key]) -> Found:
        """What is there, as far as this process knows; `refresh` learns what others added meanwhile."""
        with self.mutex:
            here = self.catalogue.present(keys).tolist()
        return Found(
            tuple(key for key, known in zip(keys, here, strict=True) if known),
            tuple(key for key, known in zip(keys, here, strict=True) if not known),
        )

    def locate(self, keys: Sequence[Key]) -> Located:
        """Raises MissingEntryError naming all that are not there. A key asked for twice is located once."""
        plan, missing = self.locate_present(tuple(dict.fromkeys(keys)))
        if missing:
            raise MissingEntryError(missing, self.folder)
        return plan

    def locate_present(self, keys: Sequence[Key]) -> tuple[Located, tuple[Key, ...]]:
        """Where those lie that are there, and the keys of the others; each key is asked for once."""
        with self.mutex:
            table, found = self.catalogue.rows(keys)
            shards, layouts = tuple(self.catalogue.shards), tuple(self.catalogue.layouts)
            runs = dict(self.catalogue.runs)
        missing = tuple([keys[at] for at in np.flatnonzero(~found).tolist()])
        return Located.of(table, shards, layouts, runs), missing

    def refresh(self) -> int:
        """Look at the folder again: shards that other processes added or removed. Returns the number of changes."""
        with self.mutex:  # listing included: a shard written meanwhile would look like one that is gone
            there = self._listing()
            gone = [name for name, size in self.catalogue.sizes.items() if there.get(name) != size]
            self.catalogue.drop_shards(gone)
            self._damaged = {name: shard for name, shard in self._damaged.items() if there.get(name) == shard.size}
            new = [name for name in there if name not in self.catalogue.sizes and name not in self._damaged]
            for name in new:
                self._learn(name, there[name])
            return len(gone) + len(new)

    def _listing(self) -> dict[str, int]:
        """The shards that are there, with their sizes."""
        there = {}
        try:
            with os.scandir(self.shards_folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # removed since it was listed
                        if is_shard(entry.name):
                            there[entry.name] = entry.stat().st_size
        except FileNotFoundError:  # a cache that was only just made
            return {}
        except OSError as error:
            raise unreadable(error, self.shards_folder) from error
        return there

    def _learn(self, name: str, size: int) -> None:
        try:
            shard = read_shard(self.shards_folder / name)
        except FileNotFoundError:
            return
        except (DamagedFileError, OSError) as error:
            self._damaged[name] = DamagedShard(name, size, str(error))
            return
        self.catalogue.add(shard)
        self._unindexed += 1

    # -- reading

    def read(self, key: Key) -> Entry:
        """The entry's tensors, in memory of their own, checked. MissingEntryError, CorruptEntryError."""
        import torch

        raw, layout = self._read_any(key)
        return layout.views(torch.from_numpy(raw))

    def read_into(
        self,
        plan: Located,
        slab: Tensor,
        offsets: NDArray[np.int64],
        *,
        threads: int | None = None,
        keep_page_cache: bool = True,
    ) -> None:
        """Fill `slab` (uint8, CPU, contiguous): entry `i` of the plan goes to `offsets[i]`, its `sizes[i]` bytes.

        Fastest where entries that follow each other in the plan do so in the slab. Every entry is checked. Those that
        are damaged raise CorruptEntryError, naming them all, when everything else is in its place. `keep_page_cache`
        False tells the kernel that each file's pages are not needed again: where CPU and GPU share one memory, they
        would be memory the GPU does not have.
        """
        view = slab.numpy().data
        if slab.ndim != 1 or view.format != "B" or not view.contiguous:
            raise ValueError(f"a slab is a contiguous row of bytes, not {slab.dtype} of shape {tuple(slab.shape)}")
        if len(offsets) != len(plan) or np.any(offsets < 0) or np.any(offsets + plan.sizes > len(slab)):
            raise ValueError(f"{len(offsets)} offsets that do not place {len(plan)} entries in {len(slab)} bytes")
        reading = Reading(self._files, plan, offsets, view)
        count = min(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))), max(1, len(reading.jobs)))
        pages = None if keep_page_cache else PageCache(self._files, [reading.shard(job) for job in reading.jobs])
        waiting = stretches(reading.jobs, count)

        def work() -> list[int]:
            failed = []
            for job in _taken(waiting):
                failed += reading.carry_out(job)
                if pages is not None:
                    pages.read(reading.shard(job))
            return failed

        if count == 1:
            failed = work()
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="gracetune-cache") as pool:
                working = [pool.submit(work) for _ in range(count)]
            failed = sorted(at for one in working for at in one.result())
        bad = [plan.keys[at] for at in failed if not self._second_try(plan, at, view, int(offsets[at]))]
        if bad:
            raise CorruptEntryError(bad, self.folder)

    def _second_try(self, plan: Located, at: int, view: memoryview, offset: int) -> bool:
        """Another copy, or the same where a merge moved it meanwhile."""
        try:
            raw, layout = self._read_any(plan.keys[at])
        except (CorruptEntryError, MissingEntryError):
            return False
        if layout != plan.layouts[at]:
            raise CacheError(_two_shapes(plan.keys[at], self.folder))
        view[offset : offset + layout.size] = raw.data
        return True

    def _read_any(self, key: Key) -> tuple[NDArray[np.uint8], Layout]:
        refreshed = damaged = False
        while True:
            with self.mutex:
                copies = self.catalogue.copies(key)
            if not copies and not refreshed:
                self.refresh()
                refreshed = True
                continue
            if not copies:
                kind = CorruptEntryError if damaged else MissingEntryError
                raise kind([key], self.folder)
            raw = self.read_copy(copies[0])
            if raw is not None:
                return raw, copies[0].layout
            damaged = damaged or (self.shards_folder / copies[0].shard).exists()
            with self.mutex:
                self.catalogue.drop_copy(copies[0])
                self._suspects.add(copies[0].shard)

    def take_suspects(self) -> frozenset[str]:
        """Files in which an entry was not as it was written; each is told once."""
        with self.mutex:
            found, self._suspects = frozenset(self._suspects), set()
        return found

    def read_copy(self, place: Place) -> NDArray[np.uint8] | None:
        """The bytes of one copy; None where they are not what was written."""
        return read_place(self._files, place)

    def stored(self) -> Iterator[tuple[str, StoredEntry]]:
        """Every entry with its origin and the name of its shard, copies included; reads all headers."""
        with self.mutex:
            names = [*self.catalogue.sizes]
        for name in names:
            with suppress(FileNotFoundError, DamagedFileError):  # merged meanwhile, or damaged after it was opened
                for entry in read_shard(self.shards_folder / name).entries():
                    yield name, entry

    # -- writing

    def writer(self, flush: Flush | None = None) -> Writer:
        """Adds entries; any number of writers, in any number of threads and processes. ReadOnlyCacheError."""
        if not self.writable:
            found, expected = "a store opened for reading", "one opened with writable=True"
            raise ReadOnlyCacheError(Problem("cache", found, expected, "open it for writing", str(self.folder)))
        return Writer(self, flush or Flush())

    def add_shard(self, entries: Sequence[Packed]) -> Shard:
        """A new shard on disk and in the catalogue; for this package's own modules."""
        needed = sum(entry.layout.size for entry in entries)
        try:
            shard = write_shard(self.shards_folder, entries)
        except OSError as error:
            raise unwritable(error, self.folder, needed=needed, free=self.free_bytes()) from error
        with self.mutex:
            self.catalogue.add(shard)
            self._unindexed += 1
        return shard

    def note_created(self, keys: Iterable[Key]) -> None:
        with self.mutex:
            self._created.update(keys)

    def forget_created(self, keys: Iterable[Key]) -> None:
        with self.mutex:
            self._created.difference_update(keys)

    def free_bytes(self) -> int | None:
        """What this user may still write to the disk the cache lies on; None where the disk does not say."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def check_room(self, size: int) -> None:
        """Before a pass: raises CacheFullError where `size` more bytes would not fit."""
        free = self.free_bytes()
        if free is None or free >= size:
            return
        hint = f"free space on that disk (`df -h {self.folder}`), or set cache.cache_dir to another"
        found, expected = f"{format_bytes(free)} free", f"room for {format_bytes(size)}"
        raise CacheFullError(Problem("cache", found, expected, hint, str(self.folder)))

    def save_index_if_worth_it(self) -> None:
        if self._unindexed >= _WORTH_INDEXING:
            self.save_index()

    def save_index(self) -> None:
        """So that the next opening reads one file instead of every header; where there is no room, it reads those."""
        with self.mutex, suppress(OSError):
            self.catalogue.write_index(self.folder / INDEX_FILE)
            self._unindexed = 0


# -- parts ------------------------------------------------------------------------------------------------------------


def _taken(waiting: deque[Sequence[Job]]) -> Iterator[Job]:
    """Some in a row, while other threads take others. Handing each to a thread would cost as much as reading it."""
    while True:
        try:
            stretch = waiting.popleft()
        except IndexError:
            return
        yield from stretch


def _indexed(folder: Path) -> Catalogue:
    try:
        return Catalogue.from_index(folder / INDEX_FILE)
    except (OSError, DamagedFileError):  # only an accelerator: the shards say the same
        return Catalogue()


def _in_use(folder: Path, *, writable: bool) -> int | None:
    """Tell others that the cache is in use. Waits only while somebody removes entries."""
    path = folder / "users.lock"
    try:
        descriptor = open_lock_file(path) if writable else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        if writable:
            raise
        return None  # never opened for writing, or nothing in it can be removed either
    lock(descriptor, exclusive=False, wait=True)
    return descriptor


def _two_shapes(key: Key, folder: Path) -> Problem:
    return Problem(
        key=f"entry {key}",
        found="two copies of different shapes",
        expected="one key, one content: the encoder's id does not tell everything that decides its output",
        hint="gracetune cache clear CONFIG, then build; please report it",
        file=str(folder),
    )
