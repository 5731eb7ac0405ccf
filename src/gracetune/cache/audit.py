"""Audit: compare the content of a cache with the needs of a configuration.

present    wanted, stored and intact
missing    wanted but not stored
corrupt    stored, but the bytes do not match the checksum; unusable shards are listed by name
stale      not wanted, but made from the same content or text as a wanted entry: another encoder, size, ...
orphaned   not wanted, and no wanted entry has the same content; another configuration may use it

`why_missing` says why entries must be encoded: new content, changed settings, another encoder, damaged bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gracetune.cache.keys import EntryOrigin, Key
from gracetune.cache.maintenance import EntryRemoval, leave_out_damaged, remove
from gracetune.cache.manifest import EntryCopy
from gracetune.cache.required_entries import LatentItem, RequiredEntry, TextItem, by_folder
from gracetune.cache.shards import StoredEntry
from gracetune.cache.store import DamagedShard, DiskStore
from gracetune.data.text_format import counted

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


# -- why entries are missing -------------------------------------------------------------------------------------------


MOST_ENTRIES: Final = 300_000
"""Largest store that is examined. Examining an entry takes 11 µs."""
MOST_COMPARED: Final = 64
"""Stored entries per content that are compared. A content may be stored for several encoders, sizes and flips."""

_ENCODERS: Final = {"latent": "the VAE", "text": "the text encoder"}
_PARTS: Final = {
    "bucket": "their size",
    "fit": "their crop",
    "clip": "the section of the clip",
    "augmentation": "their augmentation",
    "mask": "their masks",
    "conditioning": "their references",
    "pictures": "their references",
}
_SETTING: Final = "encoder.settings."


def why_missing(store_of: Callable[[Path], DiskStore], missing: Sequence[LatentItem | TextItem]) -> list[str]:
    """One line per reason, the most frequent first."""
    reasons: Counter[str] = Counter()
    new: list[LatentItem | TextItem] = []
    damaged = 0
    for folder, items in by_folder(missing).items():
        store = store_of(folder)
        if len(store.keys()) > MOST_ENTRIES:
            reasons["; the cache is too large to determine the reason"] += len(items)
            continue
        nearest = _nearest(store, items)
        kind = items[0].origin.kind
        reasons.update(_reason(kind, nearest[item.key]) for item in items if item.key in nearest)
        new += [item for item in items if item.key not in nearest]
        damaged += len(store.damaged)
    kind = missing[0].origin.kind if missing else "latent"
    lines = [f"{_count_of_kind(kind, count)} encoded{why}" for why, count in reasons.most_common()]
    if new:
        or_lost = f", or lost in {counted(damaged, 'damaged cache file')}" if damaged else ""
        lines.append(f"{_count_of_kind(kind, len(new))} encoded: {_new_content(new)}{or_lost}")
    return lines


def _nearest(store: DiskStore, items: Sequence[LatentItem | TextItem]) -> dict[str, frozenset[str]]:
    """For each wanted key, the parts in which the most similar stored entry of the same content differs.

    Keys without a stored entry of the same content are absent.
    """
    wanted: dict[tuple[str, ...], list[tuple[str, EntryOrigin]]] = {}
    for item in items:
        origin = item.origin
        wanted.setdefault(_content_of(origin), []).append((item.key, origin))
    found: dict[str, frozenset[str]] = {}
    compared: Counter[tuple[str, ...]] = Counter()
    for _, entry in store.stored():
        content = _content_of(entry.origin)
        if content not in wanted or compared[content] >= MOST_COMPARED:
            continue
        compared[content] += 1
        for key, origin in wanted[content]:
            parts = frozenset(one.part for one in differences(entry.origin, origin))
            if key not in found or len(parts) < len(found[key]):
                found[key] = parts
    return found


def _content_of(origin: EntryOrigin) -> tuple[str, ...]:
    """The source content of an entry, regardless of how it was encoded.

    The references count as content, because thousands of edit pairs often have the same instruction.
    """
    images = next((value for name, value in origin.parts if name == "pictures"), "[]")
    if images == "[]":
        return (origin.kind, origin.source)
    try:
        digests = [str(one["digest"]) for one in json.loads(images)]
    except (ValueError, TypeError, KeyError):  # written by another release
        digests = [images]
    return (origin.kind, origin.source, *digests)


def _reason(kind: str, parts: frozenset[str]) -> str:
    """The end of a line that begins with "N latents encoded"."""
    if not parts:
        return " again: they were damaged on the disk; check the disk (`dmesg`, `smartctl -a`)"
    if "encoder.weights" in parts:
        return f" again: {_ENCODERS[kind]} changed since they were cached"
    settings = [f"the encoder's {part.removeprefix(_SETTING)}" for part in parts if part.startswith(_SETTING)]
    own = [_PARTS.get(part, part) for part in parts if not part.startswith(_SETTING)]
    return f" again: {' and '.join(sorted({*settings, *own}))} changed since they were cached"


def _count_of_kind(kind: str, count: int) -> str:
    return counted(count, "latent" if kind == "latent" else "text embedding")


def _new_content(new: Sequence[LatentItem | TextItem]) -> str:
    files = {(item.ref.dataset, item.ref.path): item.ref.bucket for item in new if isinstance(item, LatentItem)}
    if any(isinstance(item, TextItem) and item.images for item in new):
        return "new captions or references"
    if not files:
        return counted(len({item.text for item in new if isinstance(item, TextItem)}), "new caption")
    media = Counter(
        "sound" if bucket.audio_samples else "clip" if bucket.frames > 1 else "image" for bucket in files.values()
    )
    return " and ".join(counted(count, f"new {medium}") for medium, count in media.most_common())
