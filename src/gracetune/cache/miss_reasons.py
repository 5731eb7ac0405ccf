"""The reasons why entries must be encoded, as text: new content, changed settings, another encoder, damaged bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gracetune.cache.audit import differences
from gracetune.cache.keys import EntryOrigin
from gracetune.cache.required_entries import LatentItem, TextItem, by_folder
from gracetune.cache.store import DiskStore
from gracetune.data.text_format import counted

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
        reasons.update(_words(kind, nearest[item.key]) for item in items if item.key in nearest)
        new += [item for item in items if item.key not in nearest]
        damaged += len(store.damaged)
    kind = missing[0].origin.kind if missing else "latent"
    lines = [f"{_counted(kind, count)} encoded{why}" for why, count in reasons.most_common()]
    if new:
        or_lost = f", or lost in {counted(damaged, 'damaged cache file')}" if damaged else ""
        lines.append(f"{_counted(kind, len(new))} encoded: {_named(new)}{or_lost}")
    return lines


def _nearest(store: DiskStore, items: Sequence[LatentItem | TextItem]) -> dict[str, frozenset[str]]:
    """For each wanted key, the parts in which the most similar stored entry of the same content differs.

    Keys without a stored entry of the same content are absent.
    """
    wanted: dict[tuple[str, ...], list[tuple[str, EntryOrigin]]] = {}
    for item in items:
        origin = item.origin
        wanted.setdefault(_content(origin), []).append((item.key, origin))
    found: dict[str, frozenset[str]] = {}
    compared: Counter[tuple[str, ...]] = Counter()
    for _, entry in store.stored():
        content = _content(entry.origin)
        if content not in wanted or compared[content] >= MOST_COMPARED:
            continue
        compared[content] += 1
        for key, origin in wanted[content]:
            parts = frozenset(one.part for one in differences(entry.origin, origin))
            if key not in found or len(parts) < len(found[key]):
                found[key] = parts
    return found


def _content(origin: EntryOrigin) -> tuple[str, ...]:
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


def _words(kind: str, parts: frozenset[str]) -> str:
    if not parts:
        return " again: they were damaged on the disk; check the disk (`dmesg`, `smartctl -a`)"
    if "encoder.weights" in parts:
        return f" again: {_ENCODERS[kind]} changed since they were cached"
    settings = [f"the encoder's {part.removeprefix(_SETTING)}" for part in parts if part.startswith(_SETTING)]
    own = [_PARTS.get(part, part) for part in parts if not part.startswith(_SETTING)]
    return f" again: {' and '.join(sorted({*settings, *own}))} changed since they were cached"


def _counted(kind: str, count: int) -> str:
    return counted(count, "latent" if kind == "latent" else "text embedding")


def _named(new: Sequence[LatentItem | TextItem]) -> str:
    files = {(item.ref.dataset, item.ref.path): item.ref.bucket for item in new if isinstance(item, LatentItem)}
    if any(isinstance(item, TextItem) and item.images for item in new):
        return "new captions or references"
    if not files:
        return counted(len({item.text for item in new if isinstance(item, TextItem)}), "new caption")
    media = Counter(
        "sound" if bucket.audio_samples else "clip" if bucket.frames > 1 else "image" for bucket in files.values()
    )
    return " and ".join(counted(count, f"new {medium}") for medium, count in media.most_common())
