"""Merging small shards and removing entries. Shards never change: survivors move to a new one, then the old one goes.

Killed in between, a cache has some entries twice, which does no harm. Who reads meanwhile keeps the files it has open,
and finds moved entries by looking at the folder again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gracetune.cache.errors import CacheBusyError, ReadOnlyCacheError, unreadable, unwritable
from gracetune.cache.folder import FORMAT_FILE, INDEX_FILE, SHARDS
from gracetune.cache.keys import Key
from gracetune.cache.manifest import Place
from gracetune.cache.shards import DamagedFileError, Packed, StoredEntry, read_shard
from gracetune.cache.store import DamagedShard, DiskStore
from gracetune.errors import Problem
from gracetune.storage.atomic import is_temporary, sync_folder, temporary_name
from gracetune.storage.locks import lock, open_lock_file
from gracetune.units import MIB

_SKELETON = (FORMAT_FILE, INDEX_FILE, SHARDS, "upkeep.lock", "users.lock", "work.lock")
"""All that an empty store consists of."""


@dataclass(frozen=True)
class ShardSize:
    """How large merged shards get; those of less than a quarter in both are small."""

    entries: int = 4096
    size: int = 256 * MIB


@dataclass(frozen=True)
class Compaction:
    shards_before: int
    shards_after: int
    copies_dropped: int
    """The same key once more."""
    damaged_dropped: int
    """Entries whose bytes were not those that were written."""
    reason: str
    """Why it was done, or was not."""


@dataclass(frozen=True)
class Removal:
    entries: int
    size: int
    """Bytes, of all copies."""


def compact(store: DiskStore, target: ShardSize | None = None) -> Compaction:
    """Merge small shards into larger ones, unless another process does just that. Others may read and write."""
    target = target or ShardSize()
    _check_writable(store)
    with _upkeep(store) as held:
        store.refresh()
        before = len(store.catalogue.sizes)
        if not held:
            return Compaction(before, before, 0, 0, "another process merges shards, or this disk has no locks")
        small = _small(store, target)
        if leave_out_damaged(store, small):
            small = _small(store, target)
        if len(small) < 2:
            return Compaction(before, before, 0, 0, "there is nothing small to merge")
        merge = _Merge(store, small)
        for group in _groups(merge.entries(), target):
            store.add_shard(group)
        _unlink(store, small)
        store.save_index()
        after = len(store.catalogue.sizes)
        return Compaction(before, after, merge.copies, merge.damaged, f"{len(small)} small shards merged")


def remove(store: DiskStore, keys: Iterable[Key]) -> Removal:
    """Remove these entries, all copies, and nothing else. CacheBusyError where another process uses the cache.

    For `persistent_cache: false`, `keys` are the store's own `created`, where several ranks wrote those of all of
    them: gathered, and removed by one process when the others have closed their stores.
    """
    _check_writable(store)
    wanted = frozenset(keys)
    with _alone(store), _upkeep(store):
        store.refresh()
        leave_out_damaged(store, _holding(store, wanted))
        affected = _affected(store, wanted)
        doomed = [name for name, survivors in affected.items() if not survivors.kept]
        _unlink(store, doomed)  # first: survivors may need the room
        for name, one in affected.items():
            if one.kept:
                packed = [found for entry in one.kept if (found := _packed(store, name, entry)) is not None]
                if packed:
                    store.add_shard(packed)
                _unlink(store, [name])
        store.forget_created(wanted)
        store.save_index()
    gone = [entry for one in affected.values() for entry in one.gone]
    return Removal(len({entry.key for entry in gone}), sum(entry.layout.size for entry in gone))


def remove_if_empty(store: DiskStore) -> None:
    """Take the folder of a store away that has nothing left; one with anything else in it stays. It is closed then.

    First by renaming, which others see at once and whole, then file by file; `sweep_removed` ends what was killed.
    """
    _check_writable(store)
    with _alone(store), _upkeep(store):
        store.refresh()
        gone = store.folder.with_name(temporary_name())
        try:
            strange = {path.name for path in store.folder.iterdir()} - {*_SKELETON}
            if strange or any(store.shards_folder.iterdir()):
                return
            store.folder.rename(gone)
        except OSError as error:
            raise unwritable(error, store.folder, needed=0, free=None) from error
        _remove_skeleton(gone)
    store.close()


def sweep_removed(folder: Path) -> None:
    """Below `folder`: what processes that were killed had already taken away."""
    for path in [*folder.iterdir()] if folder.is_dir() else ():
        if is_temporary(path.name) and path.is_dir():
            _remove_skeleton(path)


def _remove_skeleton(folder: Path) -> None:
    with suppress(OSError):  # another process does the same
        for name in _SKELETON:
            (folder / name).rmdir() if name == SHARDS else (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def leave_out_damaged(store: DiskStore, names: Iterable[str] | None = None) -> int:
    """Read the headers of these shards, or of all; damaged ones are not used from here on. Returns how many.

    An index spares reading headers, so it may know a shard whose header was damaged since: its entries can be read,
    and neither audited nor moved.
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
    """Remove the shards whose bytes are not those that were written. CacheBusyError.

    Not those that could not be read this time, nor those of another release: they may be whole.
    """
    _check_writable(store)
    with _alone(store), _upkeep(store):
        store.refresh()
        gone = tuple(one for one in store.damaged if type(_flaw(store, one.name)) is DamagedFileError)
        _unlink(store, [one.name for one in gone])
    return gone


def _flaw(store: DiskStore, name: str) -> DamagedFileError | None:
    try:
        read_shard(store.shards_folder / name)
    except DamagedFileError as error:
        return error
    except OSError:  # gone meanwhile, or unreadable for a reason of its own
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
    """The entries of small shards, each key once, damaged ones left out."""

    def __init__(self, store: DiskStore, shards: Sequence[str]) -> None:
        self._store, self._shards = store, frozenset(shards)
        self._seen: set[Key] = set()
        self.copies = self.damaged = 0

    def entries(self) -> Iterator[Packed]:
        for name in self._shards:
            for entry in _entries(self._store, name):
                if entry.key in self._seen or self._lies_elsewhere(entry.key):
                    self.copies += 1
                    continue
                packed = _packed(self._store, name, entry)
                if packed is None:
                    self.damaged += 1
                    continue
                self._seen.add(entry.key)
                yield packed

    def _lies_elsewhere(self, key: Key) -> bool:
        """A good copy in a shard that stays."""
        copies = [place for place in self._store.catalogue.copies(key) if place.shard not in self._shards]
        return any(self._store.read_copy(place) is not None for place in copies)


def _small(store: DiskStore, target: ShardSize) -> list[str]:
    counts, sizes = store.catalogue.counts(), store.catalogue.sizes
    return [name for name in sizes if 4 * counts[name] < target.entries and 4 * sizes[name] < target.size]


@dataclass(frozen=True)
class _Affected:
    kept: tuple[StoredEntry, ...]
    gone: tuple[StoredEntry, ...]


def _affected(store: DiskStore, keys: Collection[Key]) -> dict[str, _Affected]:
    """The shards that hold any of the keys."""
    entries = {name: _entries(store, name) for name in sorted(_holding(store, keys))}
    return {
        name: _Affected(
            tuple(entry for entry in found if entry.key not in keys),
            tuple(entry for entry in found if entry.key in keys),
        )
        for name, found in entries.items()
    }


def _holding(store: DiskStore, keys: Collection[Key]) -> set[str]:
    return {place.shard for key in keys for place in store.catalogue.copies(key)}


def _entries(store: DiskStore, name: str) -> tuple[StoredEntry, ...]:
    try:
        return tuple(read_shard(store.shards_folder / name).entries())
    except (OSError, DamagedFileError) as error:
        plain = error if isinstance(error, OSError) else OSError(0, str(error))
        raise unreadable(plain, store.shards_folder / name) from error


def _packed(store: DiskStore, shard: str, entry: StoredEntry) -> Packed | None:
    raw = store.read_copy(Place(shard, entry.layout, entry.start, entry.checksum))
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
        found, expected = "a store opened for reading", "one opened with writable=True"
        raise ReadOnlyCacheError(Problem("cache", found, expected, "open it for writing", str(store.folder)))


@contextmanager
def _upkeep(store: DiskStore) -> Iterator[bool]:
    """One process at a time; False where it is another one's turn."""
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
def _alone(store: DiskStore) -> Iterator[None]:
    """Nobody else has the cache open, and nobody opens it meanwhile."""
    if store.users is None:
        raise RuntimeError("this store is closed")
    grip = lock(store.users, exclusive=True)
    try:
        if grip == "busy":
            raise _busy(store.folder, "another process uses this cache", "wait until it is done, and type that again")
        if grip == "unsupported":
            hint = f"when nothing uses it any more, remove {store.folder} by hand"
            raise _busy(store.folder, "a disk without file locks, so nobody knows who else uses the cache", hint)
        yield
    finally:
        if grip != "unsupported":  # a failed attempt may cost the lock that was held: take it again
            lock(store.users, exclusive=False, wait=True)


def _busy(folder: Path, found: str, hint: str) -> CacheBusyError:
    return CacheBusyError(Problem("cache", found, "a cache nobody else has open", hint, str(folder)))
