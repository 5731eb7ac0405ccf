"""Maintenance of a store: merge small shards, remove entries and damaged shards, verify the stored bytes.

Shards are immutable. Entries to keep are copied to a new shard before the old one is deleted. If the process is killed
in between, some entries exist twice, which is harmless. Concurrent readers keep their open files and find moved entries
by refreshing.

Verification reads all bytes once. The store treats damaged entries as missing afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gracetune.cache.errors import CacheBusyError, CorruptEntryError, ReadOnlyCacheError, unreadable, unwritable
from gracetune.cache.folders import FORMAT_FILE, INDEX_FILE, SHARDS
from gracetune.cache.keys import Key
from gracetune.cache.manifest import EntryCopy
from gracetune.cache.required_entries import LatentItem, TextItem, by_folder
from gracetune.cache.shards import DamagedFileError, Packed, StoredEntry, read_shard
from gracetune.cache.store import DamagedShard, DiskStore, LocatedEntries
from gracetune.errors import Problem
from gracetune.storage.atomic import is_temporary, sync_folder, temporary_name
from gracetune.storage.locks import lock, open_lock_file
from gracetune.units import MIB

_SKELETON = (FORMAT_FILE, INDEX_FILE, SHARDS, "upkeep.lock", "users.lock", "work.lock")
"""The contents of an empty store."""


@dataclass(frozen=True)
class ShardSize:
    """The size of merged shards. Shards below a quarter of both limits count as small."""

    entries: int = 4096
    size: int = 256 * MIB
    """Bytes of the entries."""


@dataclass(frozen=True)
class Compaction:
    """The result of `compact`."""

    shards_before: int
    shards_after: int
    copies_dropped: int
    """Number of duplicate entries that were dropped."""
    damaged_dropped: int
    """Number of damaged entries that were dropped."""
    reason: str
    """Why shards were merged or not."""


@dataclass(frozen=True)
class EntryRemoval:
    """The entries that were removed."""

    entries: int
    size: int
    """Bytes, including duplicates."""


def compact(store: DiskStore, target: ShardSize | None = None) -> Compaction:
    """Merge small shards into larger ones. Other processes may read and write at the same time.

    Does nothing if another process is doing the same, or on a file system without locks.
    """
    target = target or ShardSize()
    _check_writable(store)
    with _upkeep(store) as held:
        store.refresh()
        before = len(store.catalogue.sizes)
        if not held:
            reason = "another process is merging shards, or this file system has no locks"
            return Compaction(before, before, copies_dropped=0, damaged_dropped=0, reason=reason)
        small = _small(store, target)
        if leave_out_damaged(store, small):
            small = _small(store, target)
        if len(small) < 2:
            reason = "there are no small shards to merge"
            return Compaction(before, before, copies_dropped=0, damaged_dropped=0, reason=reason)
        merge = _Merge(store, small)
        for group in _groups(merge.entries(), target):
            store.add_shard(group)
        _unlink(store, small)
        store.save_index()
        after = len(store.catalogue.sizes)
        return Compaction(before, after, merge.copies, merge.damaged, f"{len(small)} small shards were merged")


def remove(store: DiskStore, keys: Iterable[Key]) -> EntryRemoval:
    """Remove all copies of these entries, and nothing else. Raises CacheBusyError if another process uses the cache.

    For `persistent_cache: false`, pass the store's `created` keys. With several ranks, gather the keys of all ranks;
    one process removes them after the others have closed their stores.
    """
    _check_writable(store)
    unwanted = frozenset(keys)
    with _exclusive(store), _upkeep(store):
        store.refresh()
        leave_out_damaged(store, _holding(store, unwanted))
        affected = _affected(store, unwanted)
        without_survivors = [name for name, one in affected.items() if not one.kept]
        _unlink(store, without_survivors)  # first, because copying the survivors of other shards needs disk space
        for name, one in affected.items():
            if one.kept:
                packed = [found for entry in one.kept if (found := _packed(store, name, entry)) is not None]
                if packed:
                    store.add_shard(packed)
                _unlink(store, [name])
        store.forget_created(unwanted)
        store.save_index()
    gone = [entry for one in affected.values() for entry in one.gone]
    return EntryRemoval(len({entry.key for entry in gone}), sum(entry.layout.size for entry in gone))


def remove_if_empty(store: DiskStore) -> None:
    """Delete the folder of a store without entries, and close the store. A folder with any other file is kept.

    The folder is renamed first, so that other processes see the removal atomically, then deleted file by file. If the
    process is killed in between, `sweep_removed` deletes the rest later.
    """
    _check_writable(store)
    with _exclusive(store), _upkeep(store):
        store.refresh()
        gone = store.folder.with_name(temporary_name())
        try:
            foreign = {path.name for path in store.folder.iterdir()} - {*_SKELETON}
            if foreign or any(store.shards_folder.iterdir()):
                return
            store.folder.rename(gone)
        except OSError as error:
            raise unwritable(error, store.folder, needed=0, free=None) from error
        _remove_skeleton(gone)
    store.close()


def sweep_removed(folder: Path) -> None:
    """Delete stores below `folder` that killed processes had renamed for removal."""
    for path in [*folder.iterdir()] if folder.is_dir() else ():
        if is_temporary(path.name) and path.is_dir():
            _remove_skeleton(path)


def _remove_skeleton(folder: Path) -> None:
    with suppress(OSError):  # another process may do the same
        for name in _SKELETON:
            (folder / name).rmdir() if name == SHARDS else (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def leave_out_damaged(store: DiskStore, names: Iterable[str] | None = None) -> int:
    """Read the headers of these shards, or of all, and stop using damaged ones. Returns their number.

    The index makes reading headers unnecessary, so the store may know a shard whose header was damaged later. Its
    entries can be read, but neither audited nor moved, because that needs the header.
    """
    with store.mutex:
        known = [*store.catalogue.sizes] if names is None else [*names]
    bad = [name for name in known if _flaw(store, name) is not None]
    if bad:
        with store.mutex:
            store.catalogue.drop_shards(name for name in bad if name in store.catalogue.sizes)
            store.refresh()  # which lists them among the damaged
    return len(bad)


def remove_damaged(store: DiskStore) -> tuple[DamagedShard, ...]:
    """Delete damaged shards. Raises CacheBusyError.

    Unreadable shards and those in the format of another release are kept, because they may be intact.
    """
    _check_writable(store)
    with _exclusive(store), _upkeep(store):
        store.refresh()
        gone = tuple(one for one in store.damaged if type(_flaw(store, one.name)) is DamagedFileError)
        _unlink(store, [one.name for one in gone])
    return gone


def _flaw(store: DiskStore, name: str) -> DamagedFileError | None:
    """What is wrong with a shard's header or length; None if nothing is, or if it cannot be read now."""
    try:
        read_shard(store.shards_folder / name)
    except DamagedFileError as error:
        return error
    except OSError:  # removed by another process, or temporarily unreadable
        return None
    return None


def _groups(entries: Iterable[Packed], target: ShardSize) -> Iterator[list[Packed]]:
    group: list[Packed] = []
    size = 0
    for packed in entries:
        group.append(packed)
        size += packed.layout.size
        if len(group) >= target.entries or size >= target.size:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Merge:
    """Iterates over the entries of small shards without duplicates and damaged entries."""

    def __init__(self, store: DiskStore, shards: Sequence[str]) -> None:
        self._store, self._shards = store, frozenset(shards)
        self._seen: set[Key] = set()
        self.copies = self.damaged = 0

    def entries(self) -> Iterator[Packed]:
        for name in self._shards:
            for entry in _entries(self._store, name):
                if entry.key in self._seen or self._is_elsewhere(entry.key):
                    self.copies += 1
                    continue
                packed = _packed(self._store, name, entry)
                if packed is None:
                    self.damaged += 1
                    continue
                self._seen.add(entry.key)
                yield packed

    def _is_elsewhere(self, key: Key) -> bool:
        """Whether a shard that is kept has an intact copy."""
        copies = [copy for copy in self._store.catalogue.copies(key) if copy.shard not in self._shards]
        return any(self._store.read_copy(copy) is not None for copy in copies)


def _small(store: DiskStore, target: ShardSize) -> list[str]:
    counts, sizes = store.catalogue.counts(), store.catalogue.sizes
    return [name for name in sizes if 4 * counts[name] < target.entries and 4 * sizes[name] < target.size]


@dataclass(frozen=True)
class _Affected:
    kept: tuple[StoredEntry, ...]
    gone: tuple[StoredEntry, ...]


def _affected(store: DiskStore, keys: Collection[Key]) -> dict[str, _Affected]:
    """The entries to keep and to remove, for each shard that contains any of the keys."""
    entries = {name: _entries(store, name) for name in sorted(_holding(store, keys))}
    return {
        name: _Affected(
            tuple(entry for entry in found if entry.key not in keys),
            tuple(entry for entry in found if entry.key in keys),
        )
        for name, found in entries.items()
    }


def _holding(store: DiskStore, keys: Collection[Key]) -> set[str]:
    return {copy.shard for key in keys for copy in store.catalogue.copies(key)}


def _entries(store: DiskStore, name: str) -> tuple[StoredEntry, ...]:
    try:
        return tuple(read_shard(store.shards_folder / name).entries())
    except (OSError, DamagedFileError) as error:
        plain = error if isinstance(error, OSError) else OSError(0, str(error))
        raise unreadable(plain, store.shards_folder / name) from error


def _packed(store: DiskStore, shard: str, entry: StoredEntry) -> Packed | None:
    """The entry, ready to be written to another shard; None if its bytes are damaged."""
    raw = store.read_copy(EntryCopy(shard, entry.layout, entry.start, entry.checksum))
    if raw is None:
        return None
    return Packed(entry.key, entry.origin, entry.layout, raw, entry.checksum, entry.note)


def _unlink(store: DiskStore, names: Sequence[str]) -> None:
    try:
        for name in names:
            (store.shards_folder / name).unlink(missing_ok=True)
        sync_folder(store.shards_folder)
    except OSError as error:
        raise unwritable(error, store.folder, needed=0, free=None) from error
    store.refresh()


def _check_writable(store: DiskStore) -> None:
    if not store.writable:
        found, expected = "a store opened for reading", "a store opened with writable=True"
        raise ReadOnlyCacheError(Problem("cache", found, expected, "open it for writing", str(store.folder)))


@contextmanager
def _upkeep(store: DiskStore) -> Iterator[bool]:
    """Try to take the lock for maintenance. Yields False if another process holds it or locks are unsupported."""
    path = store.folder / "upkeep.lock"
    try:
        descriptor = open_lock_file(path)
    except OSError as error:
        raise unwritable(error, store.folder, needed=0, free=None) from error
    try:
        with store.mutex:
            yield lock(descriptor, exclusive=True) == "held"
    finally:
        os.close(descriptor)


@contextmanager
def _exclusive(store: DiskStore) -> Iterator[None]:
    """Make sure that no other process has the cache open, and that none opens it inside the `with` block."""
    if store.users_lock is None:
        raise RuntimeError("this store is closed")
    result = lock(store.users_lock, exclusive=True)
    try:
        if result == "busy":
            raise _busy(store.folder, "another process uses this cache", "wait until it ends, then try again")
        if result == "unsupported":
            hint = f"when no process uses it, delete {store.folder} manually"
            raise _busy(store.folder, "a file system without locks, so other users of the cache are unknown", hint)
        yield
    finally:
        if result != "unsupported":  # a failed upgrade may have dropped the shared lock: take it again
            lock(store.users_lock, exclusive=False, wait=True)


def _busy(folder: Path, found: str, hint: str) -> CacheBusyError:
    return CacheBusyError(Problem("cache", found, "a cache that no other process has open", hint, str(folder)))


# -- verification ------------------------------------------------------------------------------------------------------


OnChecked = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""

_VERIFICATION_BUFFER = 64 * MIB


def forget_damaged(
    store_of: Callable[[Path], DiskStore],
    items: Sequence[LatentItem | TextItem],
    on_checked: OnChecked = lambda done, total: None,
) -> int:
    """Read all items that are stored. Damaged ones count as missing from now on. Returns their number."""
    found = 0
    plans: list[tuple[DiskStore, LocatedEntries]] = []
    for folder, some in by_folder(items).items():
        store, keys = store_of(folder), [item.key for item in some]
        before = len(store.find(keys).present)
        leave_out_damaged(store)
        present = store.find(keys).present
        found += before - len(present)
        plans.append((store, store.locate(present)))
    total, done = sum(plan.total for _, plan in plans), 0
    for store, plan in plans:
        for chunk, size in _verification_chunks(plan):
            found += _count_damaged(store, chunk)
            done += size
            on_checked(done, total)
    return found


def recheck_suspects(store: DiskStore) -> bool:
    """Read again the shards in which a damaged entry was found since the last call.

    Damaged entries count as missing from now on, also when the store is opened next time. Entries that were unreadable
    only for a moment are available again. Returns False if there were no such shards.
    """
    suspects = store.take_suspects()
    lost = 0
    for name in suspects:
        with store.mutex:
            store.catalogue.drop_shards([name] if name in store.catalogue.sizes else [])
            store.refresh()  # reads its header again, or notices that it is damaged or was removed
        with suppress(DamagedFileError, OSError):
            keys = [entry.key for entry in read_shard(store.shards_folder / name).entries()]
            plan, _ = store.locate_present(keys)
            for chunk, _ in _verification_chunks(plan):
                lost += _count_damaged(store, chunk)
    store.take_suspects()
    # The index records the loss for the next opening. Without an index that opening reads all headers, so it finds a
    # damaged header by itself, but it cannot see damaged data.
    if lost or (suspects and store.has_index):
        store.save_index()
    return bool(suspects)


def _verification_chunks(plan: LocatedEntries) -> Iterator[tuple[tuple[Key, ...], int]]:
    """Consecutive keys whose entries fit into a buffer (at least one key), with their size in bytes."""
    first = size = 0
    for at, one in enumerate(plan.sizes.tolist()):
        if at > first and size + one > _VERIFICATION_BUFFER:
            yield plan.keys[first:at], size
            first, size = at, 0
        size += one
    if plan.keys:
        yield plan.keys[first:], size


def _count_damaged(store: DiskStore, keys: tuple[Key, ...]) -> int:
    import torch

    # The look-ahead reads at the same time: it may have found some of them damaged meanwhile.
    plan, missing = store.locate_present(keys)
    if not plan.keys:
        return len(missing)
    ends = np.cumsum(plan.sizes)
    buffer = torch.empty(int(ends[-1]), dtype=torch.uint8)
    try:
        store.read_into(plan, buffer, ends - plan.sizes)
    except CorruptEntryError as error:
        return len(missing) + len(error.keys)
    return len(missing)
