"""The reasons for encoding entries, derived from the content of the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gracetune.cache import miss_reasons as missing
from gracetune.cache.audit import OriginDifference, differences
from gracetune.cache.encoder import EncoderId
from gracetune.cache.errors import CorruptEntryError
from gracetune.cache.keys import EntryOrigin, latent_origin, text_origin
from gracetune.cache.miss_reasons import why_missing
from gracetune.cache.required_entries import LatentItem, TextItem
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.data.refs import Bucket, SampleRef
from unit.cache.samples import TEXT, VAE, entry, ref

OTHER_VAE = replace(VAE, weights="changed")
OTHER_DTYPE = replace(VAE, settings=(("dtype", "fp32"), ("posterior", "mean")))


def latent(one: SampleRef, encoder: EncoderId = VAE) -> LatentItem:
    index: Any = SimpleNamespace(describe=lambda *of: one)
    nothing: Any = None
    key = latent_origin(one, encoder).key
    return LatentItem(key, Path("cache"), (), encoder, index, nothing, nothing, nothing)


def text(words: str, encoder: EncoderId = TEXT, *images: SampleRef) -> TextItem:
    return TextItem(text_origin(words, encoder, images).key, Path("cache"), (), encoder, words, images)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """Twenty latents and two texts, ten entries per shard."""
    opened = DiskStore.open(tmp_path / "cache", writable=True)
    with opened.writer(Flush(entries=10)) as writer:
        for number in range(20):
            writer.add(latent(ref(number)).origin, entry(number))
        for words in ("a house", "a tree"):
            writer.add(text(words).origin, entry(0))
    return opened


def test_each_reason_has_its_line(store: DiskStore) -> None:
    wanted = [latent(ref(number), OTHER_VAE) for number in range(6)]
    wanted += [latent(ref(number), OTHER_DTYPE) for number in range(6, 9)]
    wanted += [latent(replace(ref(9), bucket=Bucket(32, 32), fit=None))]
    wanted += [latent(ref(number)) for number in range(100, 102)]
    wanted += [latent(replace(ref(102), bucket=Bucket(64, 64, 5)))]
    assert why_missing(lambda folder: store, wanted) == [
        "6 latents encoded again: the VAE changed since they were cached",
        "3 latents encoded again: the encoder's dtype changed since they were cached",
        "1 latent encoded again: their crop and their size changed since they were cached",
        "3 latents encoded: 2 new images and 1 new clip",
    ]
    spoken = [text("a house", replace(TEXT, weights="changed")), text("a boat")]
    assert why_missing(lambda folder: store, spoken) == [
        "1 text embedding encoded again: the text encoder changed since they were cached",
        "1 text embedding encoded: 1 new caption",
    ]
    assert why_missing(lambda folder: store, []) == []


def test_damaged_entries_and_files(store: DiskStore) -> None:
    first, second = sorted(store.shards_folder.iterdir())[:2]
    held = {name: [one.key for shard, one in store.stored() if shard == name] for name in (first.name, second.name)}
    items = {
        item.key: item for item in [*(latent(ref(number)) for number in range(20)), text("a house"), text("a tree")]
    }
    raw = bytearray(first.read_bytes())
    raw[-70] ^= 1  # in the last entry
    first.write_bytes(raw)
    bad = held[first.name][-1]
    with pytest.raises(CorruptEntryError):
        store.read(bad)
    (line,) = why_missing(lambda folder: store, [items[bad]])
    assert "1 " in line
    assert "encoded again: they were damaged on the disk" in line
    second.write_bytes(second.read_bytes()[:-64])
    store.refresh()
    lost = [
        items[key] for key in held[second.name] if items[key].origin.kind == items[held[second.name][0]].origin.kind
    ]
    (line,) = why_missing(lambda folder: store, lost)
    assert line.endswith("or lost in 1 damaged cache file")


def test_a_cache_of_very_many_entries_is_not_searched(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "MOST_ENTRIES", 10)
    assert why_missing(lambda folder: store, [latent(ref(0), OTHER_VAE)]) == [
        "1 latent encoded; the cache is too large to determine the reason"
    ]


def test_edit_pairs_that_share_their_instruction_are_compared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 pairs with one instruction: each is compared only with the entries of its own reference."""
    calls = 0

    def count(*origins: EntryOrigin) -> tuple[OriginDifference, ...]:
        nonlocal calls
        calls += 1
        return differences(*origins)

    monkeypatch.setattr(missing, "differences", count)
    changed = replace(TEXT, weights="changed")
    with DiskStore.open(tmp_path / "cache", writable=True) as store:
        with store.writer() as writer:
            for number in range(300):
                writer.add(text("make it night", TEXT, ref(number)).origin, entry(0))
        wanted = [text("make it night", changed, ref(number)) for number in range(300)]
        wanted += [text("make it night", TEXT, replace(ref(number), bucket=Bucket(32, 32))) for number in range(20)]
        wanted += [text("make it night", TEXT, ref(number)) for number in range(1000, 1007)]
        assert why_missing(lambda folder: store, wanted) == [
            "300 text embeddings encoded again: the text encoder changed since they were cached",
            "20 text embeddings encoded again: their references changed since they were cached",
            "7 text embeddings encoded: new captions or references",
        ]
    assert calls == 320


def test_of_one_content_only_so_many_entries_are_compared(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "MOST_COMPARED", 3)
    with store.writer() as writer:
        for side in range(32, 320, 32):
            writer.add(latent(replace(ref(0), bucket=Bucket(side, side))).origin, entry(0))
    calls: list[EntryOrigin] = []
    monkeypatch.setattr(missing, "differences", lambda one, other: calls.append(one) or differences(one, other))
    (line,) = why_missing(lambda folder: store, [latent(ref(0), OTHER_VAE)])
    assert line == "1 latent encoded again: the VAE changed since they were cached"
    assert len(calls) == 3
