"""The disk store: entries by key, in shards. Several processes may add to a store at the same time.

    with DiskStore.open(folder, writable=True) as store:
        missing = store.find(keys).missing
        with store.writer() as writer:
            for origin, entry in encode(missing):
                writer.add(origin, entry)            # durable after the writer's next flush
        entry = store.read(key)                      # dict of tensors

    plan = store.locate(keys)                        # for bulk loading: entries in the fastest order for the disk
    offsets = numpy.concatenate([[0], numpy.cumsum(plan.sizes)[:-1]])
    store.read_into(plan, slab, offsets)             # slab: a uint8 tensor in main memory
    entry = plan.layouts[i].views(slab[offsets[i] : offsets[i] + plan.sizes[i]])

Each writer creates its own files, so writers never wait for each other. A process opens a folder once and shares the
store between its threads. Files are read with `pread` and not memory-mapped, because truncating a mapped file kills
the process with SIGBUS.
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
from gracetune.cache.folders import INDEX_FILE, SHARDS, prepare, require
from gracetune.cache.keys import Key
from gracetune.cache.manifest import Catalogue, EntryCopy
from gracetune.cache.reading import EntryRead, LocatedEntries, OpenFiles, PageCache, ReadJob, read_entry_copy, stretches
from gracetune.cache.shards import (
    DamagedFileError,
    EntryLayout,
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

__all__ = ["DamagedShard", "DiskStore", "EntryLayout", "Flush", "FoundEntries", "LocatedEntries", "Writer"]

MAX_THREADS = 16
"""Enough to saturate a fast disk or the memory bus. More threads would contend for Python's interpreter lock."""
_WORTH_INDEXING = 16
"""New shards that justify writing the index: reading this many headers takes about as long."""


@dataclass(frozen=True)
class FoundEntries:
    present: tuple[Key, ...]
    missing: tuple[Key, ...]
    """Both in the order of the query."""


@dataclass(frozen=True)
class DamagedShard:
    """A shard whose header or length is wrong. None of its entries are used."""

    name: str
    size: int
    reason: str


class DiskStore:
    """One open cache folder. Create it with `DiskStore.open`."""

    def __init__(self, folder: Path, catalogue: Catalogue, users_lock: int | None, *, writable: bool) -> None:
        self.folder = folder
        self.writable = writable
        self.catalogue = catalogue
        """For modules of this package only, while they hold `mutex`."""
        self.mutex = threading.RLock()
        self.before_writing: Callable[[Path, Collection[Key]], None] = lambda folder, keys: None
        """Called by writers with the keys they are about to add, so that entries of a killed run can be removed later
        (`persistent_cache: false`)."""
        self.users_lock = users_lock
        """Descriptor of `users.lock`, which is locked shared while the store is open. None if it cannot be opened
        (read-only caches), and after `close`."""
        self._damaged: dict[str, DamagedShard] = {}
        self._created: set[Key] = set()
        self._suspects: set[str] = set()
        self._files = OpenFiles(self.shards_folder)
        self._unindexed = 0

    @classmethod
    def open(cls, folder: Path, *, writable: bool) -> DiskStore:
        """Open the store of a folder. With `writable`, a missing folder is created.

        Raises ForeignFolderError, ReadOnlyCacheError or CacheError.
        """
        folder = folder.absolute()
        if writable:
            prepare(folder)
        require(folder)
        try:
            users_lock = _mark_in_use(folder, writable=writable)
        except OSError as error:
            raise unwritable(error, folder, needed=0, free=None) from error
        store = cls(folder, _read_index(folder), users_lock, writable=writable)
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
            if self.users_lock is not None:
                os.close(self.users_lock)
                self.users_lock = None

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
        """Shards that were skipped when the store was opened or refreshed."""
        with self.mutex:
            return tuple(self._damaged.values())

    @property
    def created(self) -> frozenset[Key]:
        """Keys that writers of this store have flushed. `persistent_cache: false` removes only these."""
        with self.mutex:
            return frozenset(self._created)

    # -- finding

    def __contains__(self, key: Key) -> bool:
        with self.mutex:
            return bool(self.catalogue.copies(key))

    def keys(self) -> list[Key]:
        """All keys, sorted."""
        with self.mutex:
            return self.catalogue.keys()

    def find(self, keys: Sequence[Key]) -> FoundEntries:
        """Split `keys` into present and missing ones, as far as this process knows. `refresh` updates its knowledge."""
        with self.mutex:
            is_present = self.catalogue.present(keys).tolist()
        return FoundEntries(
            tuple(key for key, known in zip(keys, is_present, strict=True) if known),
            tuple(key for key, known in zip(keys, is_present, strict=True) if not known),
        )

    def locate(self, keys: Sequence[Key]) -> LocatedEntries:
        """Locations of all keys. Duplicates count once. Raises MissingEntryError with all keys that are missing."""
        plan, missing = self.locate_present(tuple(dict.fromkeys(keys)))
        if missing:
            raise MissingEntryError(missing, self.folder)
        return plan

    def locate_present(self, keys: Sequence[Key]) -> tuple[LocatedEntries, tuple[Key, ...]]:
        """Locations of the keys that are present, and the missing keys. `keys` must be distinct."""
        with self.mutex:
            table, found = self.catalogue.rows(keys)
            shards, layouts = tuple(self.catalogue.shards), tuple(self.catalogue.layouts)
            runs = dict(self.catalogue.runs)
        missing = tuple([keys[at] for at in np.flatnonzero(~found).tolist()])
        return LocatedEntries.of(table, shards, layouts, runs), missing

    def refresh(self) -> int:
        """List the folder again to find shards that were added or removed. Returns the number of changes."""
        # The lock covers the listing too: a shard added after an unlocked listing would look as if it were removed.
        with self.mutex:
            sizes = self._list_shards()
            gone = [name for name, size in self.catalogue.sizes.items() if sizes.get(name) != size]
            self.catalogue.drop_shards(gone)
            self._damaged = {name: shard for name, shard in self._damaged.items() if sizes.get(name) == shard.size}
            new = [name for name in sizes if name not in self.catalogue.sizes and name not in self._damaged]
            for name in new:
                self._add_from_disk(name, sizes[name])
            return len(gone) + len(new)

    def _list_shards(self) -> dict[str, int]:
        """File names and sizes of all shards."""
        sizes = {}
        try:
            with os.scandir(self.shards_folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # removed since it was listed
                        if is_shard(entry.name):
                            sizes[entry.name] = entry.stat().st_size
        except FileNotFoundError:  # another process is creating the cache
            return {}
        except OSError as error:
            raise unreadable(error, self.shards_folder) from error
        return sizes

    def _add_from_disk(self, name: str, size: int) -> None:
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
        """Read one entry, verified, into newly allocated tensors. Raises MissingEntryError, CorruptEntryError."""
        import torch

        raw, layout = self._read_any(key)
        return layout.views(torch.from_numpy(raw))

    def read_into(
        self,
        plan: LocatedEntries,
        slab: Tensor,
        offsets: NDArray[np.int64],
        *,
        threads: int | None = None,
        keep_page_cache: bool = True,
    ) -> None:
        """Read entry `i` of the plan into the `sizes[i]` bytes of `slab` that start at `offsets[i]`.

        `slab` is a contiguous uint8 tensor on the CPU. Reading is fastest if entries adjacent in the plan are adjacent
        in the slab. Every entry is verified. After all other entries are in place, CorruptEntryError lists the damaged
        ones. With `keep_page_cache=False` the kernel drops the pages of each file after its last read. Use that where
        CPU and GPU share one memory, because the page cache takes memory from the GPU there.
        """
        view = slab.numpy().data
        if slab.ndim != 1 or view.format != "B" or not view.contiguous:
            found = f"{slab.dtype} of shape {tuple(slab.shape)}"
            raise ValueError(f"expected a contiguous one-dimensional uint8 tensor, found {found}")
        if len(offsets) != len(plan) or np.any(offsets < 0) or np.any(offsets + plan.sizes > len(slab)):
            raise ValueError(f"{len(offsets)} offsets do not place {len(plan)} entries in {len(slab)} bytes")
        reading = EntryRead(self._files, plan, offsets, view)
        count = min(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))), max(1, len(reading.jobs)))
        pages = None if keep_page_cache else PageCache(self._files, [reading.shard(job) for job in reading.jobs])
        queue = stretches(reading.jobs, count)

        def work() -> list[int]:
            failed = []
            for job in _jobs_from(queue):
                failed += reading.carry_out(job)
                if pages is not None:
                    pages.finish_job(reading.shard(job))
            return failed

        if count == 1:
            failed = work()
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="gracetune-cache") as pool:
                futures = [pool.submit(work) for _ in range(count)]
            failed = sorted(at for future in futures for at in future.result())
        bad = [plan.keys[at] for at in failed if not self._second_try(plan, at, view, int(offsets[at]))]
        if bad:
            raise CorruptEntryError(bad, self.folder)

    def _second_try(self, plan: LocatedEntries, at: int, view: memoryview, offset: int) -> bool:
        """Read another copy of the entry, or the same one from the shard that a merge moved it to."""
        try:
            raw, layout = self._read_any(plan.keys[at])
        except (CorruptEntryError, MissingEntryError):
            return False
        if layout != plan.layouts[at]:
            raise CacheError(_conflicting_copies(plan.keys[at], self.folder))
        view[offset : offset + layout.size] = raw.data
        return True

    def _read_any(self, key: Key) -> tuple[NDArray[np.uint8], EntryLayout]:
        """Try the copies one by one. Damaged ones leave the catalogue; `recheck_suspects` reads their shards again."""
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
        """Shards in which a damaged entry was found since the last call, for `maintenance.recheck_suspects`."""
        with self.mutex:
            found, self._suspects = frozenset(self._suspects), set()
        return found

    def read_copy(self, copy: EntryCopy) -> NDArray[np.uint8] | None:
        """The bytes of one copy, or None if they do not match the checksum or cannot be read."""
        return read_entry_copy(self._files, copy)

    def stored(self) -> Iterator[tuple[str, StoredEntry]]:
        """Each entry, duplicates included, with the name of its shard. Reads all shard headers."""
        with self.mutex:
            names = [*self.catalogue.sizes]
        for name in names:
            with suppress(FileNotFoundError, DamagedFileError):  # merged or damaged since the last refresh
                for entry in read_shard(self.shards_folder / name).entries():
                    yield name, entry

    # -- writing

    def writer(self, flush: Flush | None = None) -> Writer:
        """A writer that adds entries. Any number of writers, threads and processes may write at the same time.

        Raises ReadOnlyCacheError if the store was opened without `writable`.
        """
        if not self.writable:
            found, expected = "a store opened for reading", "a store opened with writable=True"
            raise ReadOnlyCacheError(Problem("cache", found, expected, "open it for writing", str(self.folder)))
        return Writer(self, flush or Flush())

    def add_shard(self, entries: Sequence[Packed]) -> Shard:
        """Write a new shard and add it to the catalogue. For modules of this package only."""
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
        """Free bytes of the file system for this user, or None if they are unknown."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def check_room(self, size: int) -> None:
        """Raise CacheFullError if `size` more bytes do not fit on the disk."""
        free = self.free_bytes()
        if free is None or free >= size:
            return
        hint = f"free space on that disk (`df -h {self.folder}`), or set cache.cache_dir to a folder on another disk"
        found, expected = f"{format_bytes(free)} free", f"{format_bytes(size)} free"
        raise CacheFullError(Problem("cache", found, expected, hint, str(self.folder)))

    def save_index_if_worth_it(self) -> None:
        if self._unindexed >= _WORTH_INDEXING:
            self.save_index()

    def save_index(self) -> None:
        """Write the index, so the next opening reads one file instead of all shard headers. Best effort."""
        with self.mutex, suppress(OSError):
            self.catalogue.write_index(self.folder / INDEX_FILE)
            self._unindexed = 0


# -- helpers ----------------------------------------------------------------------------------------------------------


def _jobs_from(queue: deque[Sequence[ReadJob]]) -> Iterator[ReadJob]:
    """Jobs of one thread, taken from the common queue several at a time.

    Submitting each job to a thread pool would take as long as reading it.
    """
    while True:
        try:
            stretch = queue.popleft()
        except IndexError:
            return
        yield from stretch


def _read_index(folder: Path) -> Catalogue:
    try:
        return Catalogue.from_index(folder / INDEX_FILE)
    except (OSError, DamagedFileError):  # only an accelerator: `refresh` reads the shard headers instead
        return Catalogue()


def _mark_in_use(folder: Path, *, writable: bool) -> int | None:
    """Take the shared lock that marks the cache as in use. Waits only while another process removes entries."""
    path = folder / "users.lock"
    try:
        descriptor = open_lock_file(path) if writable else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        if writable:
            raise
        return None  # no writer has opened this cache, or it is read-only: either way no entry is removed
    try:
        lock(descriptor, exclusive=False, wait=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _conflicting_copies(key: Key, folder: Path) -> Problem:
    return Problem(
        key=f"entry {key}",
        found="two copies with different shapes, so the encoder's id omits something that affects its output",
        expected="the same content for the same key",
        hint="run `gracetune cache clear CONFIG`, then `gracetune cache build CONFIG`; please report this bug",
        file=str(folder),
    )
