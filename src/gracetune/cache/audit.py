"""What a cache holds against what a configuration wants.

present    wanted, there and whole
missing    wanted, and not there
corrupt    there, and not as it was written; shards that cannot be used at all are listed by name
stale      not wanted, but made of the same content or text as something wanted: another encoder, size, ...
orphaned   not wanted, and nothing wanted is made of the same content (another configuration may want it)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gracetune.cache.keys import Key, Origin
from gracetune.cache.manifest import Place
from gracetune.cache.shards import StoredEntry
from gracetune.cache.store import DamagedShard, DiskStore
from gracetune.cache.upkeep import Removal, leave_out_damaged, remove

_EXAMPLES = 20
_ATTEMPTS = 5


@dataclass(frozen=True)
class Wanted:
    origin: Origin
    what: str
    """For people: the file, or the beginning of the caption."""


@dataclass(frozen=True)
class Difference:
    part: str
    stored: str | None
    wanted: str | None
    """None where one of the two has no such part."""


@dataclass(frozen=True)
class Stale:
    key: Key
    what: str
    """The wanted thing that has the same source and the fewest differences."""
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Group:
    """Some entries: how many, their bytes on disk (None where unknown), and all their keys."""

    entries: int
    size: int | None
    keys: tuple[Key, ...]

    def as_json(self) -> dict[str, Any]:
        return {"entries": self.entries, "bytes": self.size}


@dataclass(frozen=True)
class Audit:
    wanted: int
    """Distinct entries."""
    present: Group
    missing: Group
    missing_examples: tuple[str, ...]
    corrupt: Group
    corrupt_examples: tuple[str, ...]
    """Of those that are wanted; what the others were made of is no longer known here."""
    damaged_shards: tuple[DamagedShard, ...]
    stale: Group
    stale_parts: dict[str, int]
    """How many stale entries differ in each part."""
    stale_examples: tuple[Stale, ...]
    orphaned: Group
    extra_copies: Group
    """Entries that are there more than once, which costs room and nothing else."""
    imported: int
    """Present entries that we did not encode ourselves."""
    checked: bool
    """Whether every entry's bytes were read and compared with their checksum."""

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

    def group(self) -> Group:
        return Group(len(self.keys), self.size, tuple(self.keys))


def audit(
    store: DiskStore,
    wanted: Iterable[Wanted],
    *,
    check: bool = True,
    on_checked: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """`check` reads every byte; without it only headers are looked at, and corrupt entries count as present.

    `on_checked` is told the bytes that were read and those of all files.
    """
    asked = {one.origin.key: one for one in wanted}
    for _ in range(_ATTEMPTS):
        store.refresh()
        leave_out_damaged(store)
        shards = {*store.catalogue.sizes}
        look = _look(store, asked, check=check, on_checked=on_checked)
        store.refresh()
        # Where another process merged shards meanwhile, their entries lie elsewhere now: neither corrupt nor missing.
        if shards <= {*store.catalogue.sizes}:
            break
    bad = {key: entry for key, entry in look.bad.items() if key not in look.seen}
    missing = tuple(key for key in asked if key not in look.seen and key not in bad)
    corrupt = _Pile()
    for entry in bad.values():
        corrupt.add(entry)
    return Audit(
        wanted=len(asked),
        present=look.present.group(),
        missing=Group(len(missing), None if missing else 0, missing),
        missing_examples=tuple(asked[key].what for key in missing[:_EXAMPLES]),
        corrupt=corrupt.group(),
        corrupt_examples=tuple(asked[key].what for key in bad if key in asked)[:_EXAMPLES],
        damaged_shards=store.damaged,
        stale=look.stale.group(),
        stale_parts=dict(look.parts.most_common()),
        stale_examples=tuple(look.examples),
        orphaned=look.orphaned.group(),
        extra_copies=look.copies.group(),
        imported=look.imported,
        checked=check,
    )


def _look(store: DiskStore, asked: dict[Key, Wanted], *, check: bool, on_checked: Callable[[int, int], None]) -> _Look:
    look = _Look(store, asked, check=check)
    total, done = sum(store.catalogue.sizes.values()), 0
    for shard, entry in store.stored():
        look.at(shard, entry)
        done += entry.layout.size
        on_checked(done, total)
    on_checked(total, total)
    return look


def clear(store: DiskStore, keys: Iterable[Key]) -> Removal:
    """Remove these entries of ours, and nothing else. CacheBusyError where another process uses the cache."""
    return remove(store, keys)


class _Look:
    """One pass over everything stored."""

    def __init__(self, store: DiskStore, asked: dict[Key, Wanted], *, check: bool) -> None:
        self._store, self._asked, self._check = store, asked, check
        self._by_source: dict[tuple[str, str], list[Wanted]] = {}
        for one in asked.values():
            self._by_source.setdefault((one.origin.kind, one.origin.source), []).append(one)
        self.seen: set[Key] = set()
        self.bad: dict[Key, StoredEntry] = {}
        self.present, self.stale, self.orphaned, self.copies = _Pile(), _Pile(), _Pile(), _Pile()
        self.parts: Counter[str] = Counter()
        self.examples: list[Stale] = []
        self.imported = 0

    def at(self, shard: str, entry: StoredEntry) -> None:
        if self._check and not self._is_whole(shard, entry):
            self.bad[entry.key] = entry
            return
        if entry.key in self.seen:
            self.copies.add(entry)
            return
        self.seen.add(entry.key)
        if entry.key in self._asked:
            self.present.add(entry)
            self.imported += bool(entry.note)
            return
        related = self._by_source.get((entry.origin.kind, entry.origin.source))
        if related is None:
            self.orphaned.add(entry)
            return
        self.stale.add(entry)
        self._explain(entry, related)

    def _is_whole(self, shard: str, entry: StoredEntry) -> bool:
        place = Place(shard, entry.layout, entry.start, entry.checksum)
        # The key is the hash of the origin: one that is not came from a release whose keys meant something else.
        return entry.origin.key == entry.key and self._store.read_copy(place) is not None

    def _explain(self, entry: StoredEntry, related: list[Wanted]) -> None:
        candidates = ((one, differences(entry.origin, one.origin)) for one in related)
        nearest, found = min(candidates, key=lambda pair: len(pair[1]))
        self.parts.update(difference.part for difference in found)
        if len(self.examples) < _EXAMPLES:
            self.examples.append(Stale(entry.key, nearest.what, found))


def differences(stored: Origin, wanted: Origin) -> tuple[Difference, ...]:
    """Part by part; the kind and the source are taken to be the same."""
    before, now = dict(stored.parts), dict(wanted.parts)
    names = sorted({*before, *now})
    return tuple(
        Difference(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)
    )
