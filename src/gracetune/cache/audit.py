"""Audit: compare the content of a cache with the needs of a configuration.

present    wanted, stored and intact
missing    wanted but not stored
corrupt    stored, but the bytes do not match the checksum; unusable shards are listed by name
stale      not wanted, but made from the same content or text as a wanted entry: another encoder, size, ...
orphaned   not wanted, and no wanted entry has the same content; another configuration may use it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gracetune.cache.keys import EntryOrigin, Key
from gracetune.cache.maintenance import EntryRemoval, leave_out_damaged, remove
from gracetune.cache.manifest import EntryCopy
from gracetune.cache.required_entries import RequiredEntry
from gracetune.cache.shards import StoredEntry
from gracetune.cache.store import DamagedShard, DiskStore

_EXAMPLES = 20
_ATTEMPTS = 5
"""How often to start again if other processes merge shards during an audit."""


@dataclass(frozen=True)
class OriginDifference:
    """A part that differs between two origins. A value is None if that origin lacks the part."""

    part: str
    stored: str | None
    wanted: str | None


@dataclass(frozen=True)
class StaleEntry:
    """A stale entry, with its differences from the most similar wanted entry of the same source."""

    key: Key
    what: str
    """Description of that wanted entry."""
    differences: tuple[OriginDifference, ...]


@dataclass(frozen=True)
class EntryGroup:
    """A set of entries: number, bytes on disk (None if unknown), and keys."""

    entries: int
    size: int | None
    keys: tuple[Key, ...]

    def as_json(self) -> dict[str, Any]:
        return {"entries": self.entries, "bytes": self.size}


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    wanted: int
    """Number of distinct wanted entries."""
    present: EntryGroup
    missing: EntryGroup
    missing_examples: tuple[str, ...]
    corrupt: EntryGroup
    corrupt_examples: tuple[str, ...]
    """Descriptions of wanted entries only; those of the others are unknown."""
    damaged_shards: tuple[DamagedShard, ...]
    stale: EntryGroup
    stale_parts: dict[str, int]
    """Number of stale entries that differ, by part."""
    stale_examples: tuple[StaleEntry, ...]
    orphaned: EntryGroup
    extra_copies: EntryGroup
    """Duplicates of stored entries. They are harmless but take space."""
    imported: int
    """Number of present entries that were imported from another program."""
    checked: bool
    """Whether the bytes of all entries were read and compared with their checksums."""

    def as_json(self) -> dict[str, Any]:
        return {
            "wanted": self.wanted,
            "present": self.present.as_json(),
            "missing": self.missing.as_json(),
            "corrupt": self.corrupt.as_json(),
            "stale": self.stale.as_json(),
            "orphaned": self.orphaned.as_json(),
            "extra_copies": self.extra_copies.as_json(),
            "missing_examples": [*self.missing_examples],
            "corrupt_examples": [*self.corrupt_examples],
            "damaged_shards": [asdict(shard) for shard in self.damaged_shards],
            "stale_parts": self.stale_parts,
            "stale_examples": [asdict(one) for one in self.stale_examples],
            "imported": self.imported,
            "checked": self.checked,
        }


@dataclass
class _Pile:
    keys: list[Key] = field(default_factory=list)
    size: int = 0

    def add(self, entry: StoredEntry) -> None:
        self.keys.append(entry.key)
        self.size += entry.layout.size

    def group(self) -> EntryGroup:
        return EntryGroup(len(self.keys), self.size, tuple(self.keys))


def audit(
    store: DiskStore,
    wanted: Iterable[RequiredEntry],
    *,
    check: bool = True,
    on_checked: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Audit a store. With `check`, read every byte. Without it, read only headers; corrupt entries count as present.

    `on_checked` is called with the bytes read so far and the total.
    """
    by_key = {one.origin.key: one for one in wanted}
    for _ in range(_ATTEMPTS):
        store.refresh()
        leave_out_damaged(store)
        shards = {*store.catalogue.sizes}
        scan = _scan(store, by_key, check=check, on_checked=on_checked)
        store.refresh()
        # If another process merged shards during the scan, moved entries may look corrupt or missing: scan again.
        if shards <= {*store.catalogue.sizes}:
            break
    bad = {key: entry for key, entry in scan.bad.items() if key not in scan.seen}
    missing = tuple(key for key in by_key if key not in scan.seen and key not in bad)
    corrupt = _Pile()
    for entry in bad.values():
        corrupt.add(entry)
    return Audit(
        wanted=len(by_key),
        present=scan.present.group(),
        missing=EntryGroup(len(missing), None if missing else 0, missing),
        missing_examples=tuple(by_key[key].what for key in missing[:_EXAMPLES]),
        corrupt=corrupt.group(),
        corrupt_examples=tuple(by_key[key].what for key in bad if key in by_key)[:_EXAMPLES],
        damaged_shards=store.damaged,
        stale=scan.stale.group(),
        stale_parts=dict(scan.parts.most_common()),
        stale_examples=tuple(scan.examples),
        orphaned=scan.orphaned.group(),
        extra_copies=scan.copies.group(),
        imported=scan.imported,
        checked=check,
    )


def _scan(
    store: DiskStore, wanted: dict[Key, RequiredEntry], *, check: bool, on_checked: Callable[[int, int], None]
) -> _Scan:
    scan = _Scan(store, wanted, check=check)
    total, done = sum(store.catalogue.sizes.values()), 0
    for shard, entry in store.stored():
        scan.add(shard, entry)
        done += entry.layout.size
        on_checked(done, total)
    on_checked(total, total)
    return scan


def clear(store: DiskStore, keys: Iterable[Key]) -> EntryRemoval:
    """Remove these entries and nothing else. Raises CacheBusyError if another process uses the cache."""
    return remove(store, keys)


class _Scan:
    """Sorts all stored entries into the groups of an audit."""

    def __init__(self, store: DiskStore, wanted: dict[Key, RequiredEntry], *, check: bool) -> None:
        self._store, self._wanted, self._check = store, wanted, check
        self._by_source: dict[tuple[str, str], list[RequiredEntry]] = {}
        for one in wanted.values():
            self._by_source.setdefault((one.origin.kind, one.origin.source), []).append(one)
        self.seen: set[Key] = set()
        self.bad: dict[Key, StoredEntry] = {}
        self.present, self.stale, self.orphaned, self.copies = _Pile(), _Pile(), _Pile(), _Pile()
        self.parts: Counter[str] = Counter()
        self.examples: list[StaleEntry] = []
        self.imported = 0

    def add(self, shard: str, entry: StoredEntry) -> None:
        if self._check and not self._is_intact(shard, entry):
            self.bad[entry.key] = entry
            return
        if entry.key in self.seen:
            self.copies.add(entry)
            return
        self.seen.add(entry.key)
        if entry.key in self._wanted:
            self.present.add(entry)
            self.imported += bool(entry.note)
            return
        related = self._by_source.get((entry.origin.kind, entry.origin.source))
        if related is None:
            self.orphaned.add(entry)
            return
        self.stale.add(entry)
        self._explain(entry, related)

    def _is_intact(self, shard: str, entry: StoredEntry) -> bool:
        copy = EntryCopy(shard, entry.layout, entry.start, entry.checksum)
        # A key that is not the hash of its origin was computed differently, by another release.
        return entry.origin.key == entry.key and self._store.read_copy(copy) is not None

    def _explain(self, entry: StoredEntry, related: list[RequiredEntry]) -> None:
        candidates = ((one, differences(entry.origin, one.origin)) for one in related)
        nearest, found = min(candidates, key=lambda pair: len(pair[1]))
        self.parts.update(difference.part for difference in found)
        if len(self.examples) < _EXAMPLES:
            self.examples.append(StaleEntry(entry.key, nearest.what, found))


def differences(stored: EntryOrigin, wanted: EntryOrigin) -> tuple[OriginDifference, ...]:
    """The parts in which two origins differ. Their kind and source are not compared."""
    before, now = dict(stored.parts), dict(wanted.parts)
    names = sorted({*before, *now})
    return tuple(
        OriginDifference(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)
    )
