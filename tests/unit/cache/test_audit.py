from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gracetune.cache.audit import OriginDifference, audit, clear, differences, why_missing
from gracetune.cache.encoder import EncoderId
from gracetune.cache.errors import CorruptEntryError
from gracetune.cache.keys import EntryOrigin, latent_origin, text_origin
from gracetune.cache.maintenance import compact
from gracetune.cache.required_entries import LatentItem, RequiredEntry, TextItem
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.data.refs import Bucket, SampleRef
from unit.cache.sample_caches import places_of
from unit.cache.samples import TEXT, VAE, entry, key, origin, ref

FP32 = replace(VAE, settings=(("dtype", "fp32"), *VAE.settings[1:]))
SIZE = 576


def put(folder: Path, origins: list[EntryOrigin], note: str = "") -> None:
    with DiskStore.open(folder, writable=True) as store, store.writer(Flush(entries=4)) as writer:
        for number, one in enumerate(origins):
            writer.add(one, entry(number), note)


def wanted(numbers: range) -> list[RequiredEntry]:
    return [RequiredEntry(origin(number), f"{number}.png") for number in numbers]


def test_present_and_missing(tmp_path: Path) -> None:
    put(tmp_path, [origin(number) for number in range(6)])
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, [*wanted(range(2, 9)), *wanted(range(2, 4))])
    assert found.wanted == 7
    assert (found.present.entries, found.present.size) == (4, 4 * SIZE)
    assert found.missing.keys == (key(6), key(7), key(8))
    assert found.missing.size is None
    assert found.missing_examples == ("6.png", "7.png", "8.png")
    assert {*found.orphaned.keys} == {key(0), key(1)}
    assert found.orphaned.size == 2 * SIZE
    assert (found.stale.entries, found.corrupt.entries, found.extra_copies.entries) == (0, 0, 0)
    assert found.checked


def test_a_stale_entry_tells_which_part_differs(tmp_path: Path) -> None:
    other_size = latent_origin(replace(ref(1), bucket=Bucket(32, 32)), VAE)
    put(tmp_path, [latent_origin(ref(0), FP32), other_size, latent_origin(ref(9), FP32)])
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, wanted(range(3)))
    assert {*found.stale.keys} == {latent_origin(ref(0), FP32).key, other_size.key}
    assert found.stale.size == 2 * SIZE
    assert found.stale_parts == {"encoder.settings.dtype": 1, "bucket": 1}
    examples = {one.what: one.differences for one in found.stale_examples}
    assert examples == {
        "0.png": (OriginDifference("encoder.settings.dtype", "fp32", "bf16"),),
        "1.png": (OriginDifference("bucket", "[32,32,1,0,0]", "[64,64,1,0,0]"),),
    }
    assert found.missing.entries == 3
    assert found.orphaned.entries == 1, "of a picture nobody wants in any form"


def test_a_stale_entry_is_compared_with_the_nearest_wanted_one(tmp_path: Path) -> None:
    small, large = replace(ref(1), bucket=Bucket(32, 32)), replace(ref(1), bucket=Bucket(96, 96))
    put(tmp_path, [latent_origin(small, FP32)])
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(
            store,
            [RequiredEntry(latent_origin(large, VAE), "large"), RequiredEntry(latent_origin(small, VAE), "small")],
        )
    assert [(one.what, len(one.differences)) for one in found.stale_examples] == [("small", 1)]


def test_an_entry_wanted_in_two_forms_is_not_stale(tmp_path: Path) -> None:
    small = latent_origin(replace(ref(1), bucket=Bucket(32, 32)), VAE)
    put(tmp_path, [origin(1), small])
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, [*wanted(range(1, 2)), RequiredEntry(small, "small")])
    assert (found.present.entries, found.stale.entries) == (2, 0)


def test_text_is_compared_with_text(tmp_path: Path) -> None:
    put(tmp_path, [text_origin("a house", replace(TEXT, weights="other")), text_origin("a car", TEXT)])
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, [RequiredEntry(text_origin("a house", TEXT), "a house")])
    assert found.stale_parts == {"encoder.weights": 1}
    assert found.orphaned.keys == (text_origin("a car", TEXT).key,)


def test_corrupt_entries_and_damaged_shards_are_named(tmp_path: Path) -> None:
    put(tmp_path, [origin(number) for number in range(8)])
    folders = {}
    with DiskStore.open(tmp_path, writable=False) as store:
        for name, found in store.stored():
            folders[found.key] = (tmp_path / "shards" / name, found.start)
    path, start = folders[key(1)]
    raw = bytearray(path.read_bytes())
    raw[start] ^= 1
    path.write_bytes(raw)
    cut = folders[key(5)][0]
    cut.write_bytes(cut.read_bytes()[:-10])
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, wanted(range(8)))
        assert found.corrupt.keys == (key(1),)
        assert found.corrupt.size == SIZE
        assert found.corrupt_examples == ("1.png",)
        assert [shard.name for shard in found.damaged_shards] == [cut.name]
        assert "bytes instead of" in found.damaged_shards[0].reason
        assert {*found.missing.keys} == {key(number) for number in range(4, 8)}
        assert found.present.entries == 3
        quick = audit(store, wanted(range(8)), check=False)
        assert (quick.corrupt.entries, quick.present.entries, quick.checked) == (0, 4, False)


def test_a_corrupt_copy_beside_a_good_one_is_no_corrupt_entry(tmp_path: Path) -> None:
    put(tmp_path, [origin(1)])
    (path,) = (tmp_path / "shards").iterdir()
    (tmp_path / "shards" / f"{'a' * 32}.safetensors").write_bytes(path.read_bytes())
    with DiskStore.open(tmp_path, writable=False) as store:
        assert audit(store, wanted(range(1, 2))).extra_copies.entries == 1
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, wanted(range(1, 2)))
    assert (found.present.entries, found.corrupt.entries) == (1, 0)


def test_imported_entries_are_counted(tmp_path: Path) -> None:
    put(tmp_path, [origin(0)])
    put(tmp_path, [origin(1)], note="imported from ai-toolkit")
    with DiskStore.open(tmp_path, writable=False) as store:
        assert audit(store, wanted(range(2))).imported == 1


def test_clear_removes_what_the_configuration_wants_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, [origin(number) for number in range(6)])
    with DiskStore.open(tmp_path, writable=True) as store:
        assert clear(store, [key(number) for number in range(2, 9)]).entries == 4
        assert store.keys() == sorted([key(0), key(1)])


def test_an_audit_is_json(tmp_path: Path) -> None:
    put(tmp_path, [latent_origin(ref(0), FP32), origin(1)])
    with DiskStore.open(tmp_path, writable=False) as store:
        stated = json.loads(json.dumps(audit(store, wanted(range(3))).as_json()))
    assert stated["present"] == {"entries": 1, "bytes": SIZE}
    assert stated["missing"] == {"entries": 2, "bytes": None}
    assert stated["stale"] == {"entries": 1, "bytes": SIZE}
    assert stated["stale_parts"] == {"encoder.settings.dtype": 1}
    assert stated["stale_examples"][0]["differences"][0] == {
        "part": "encoder.settings.dtype",
        "stored": "fp32",
        "wanted": "bf16",
    }


def test_a_header_damaged_since_the_index_was_written(tmp_path: Path) -> None:
    """An audit must not report entries as missing that a build considers present."""
    put(tmp_path, [origin(number) for number in range(8)])
    with DiskStore.open(tmp_path, writable=True) as store:
        store.save_index()
        victim = tmp_path / "shards" / places_of(store.locate([key(0)]))[0].shard
    raw = bytearray(victim.read_bytes())
    raw[300] ^= 1
    victim.write_bytes(raw)
    seen: list[tuple[int, int]] = []
    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, wanted(range(8)), on_checked=lambda done, total: seen.append((done, total)))
        assert [one.name for one in found.damaged_shards] == [victim.name]
        assert {*found.missing.keys} == {*store.find([key(number) for number in range(8)]).missing}
        assert found.missing.entries == 4
    assert seen[-1][0] == seen[-1][1] > 4 * SIZE


def test_shards_merged_meanwhile_are_neither_corrupt_nor_missing(tmp_path: Path) -> None:
    put(tmp_path, [origin(number) for number in range(12)])
    merged: list[int] = []

    def merge(done: int, total: int) -> None:
        if not merged:
            with DiskStore.open(tmp_path, writable=True) as other:
                merged.append(compact(other).shards_after)

    with DiskStore.open(tmp_path, writable=False) as store:
        found = audit(store, wanted(range(12)), on_checked=merge)
    assert merged == [1]
    assert (found.present.entries, found.corrupt.entries, found.missing.entries) == (12, 0, 0)
    assert found.extra_copies.entries == 0


# -- why entries are missing -------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("gracetune.cache.audit.MOST_ENTRIES", 10)
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

    monkeypatch.setattr("gracetune.cache.audit.differences", count)
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
    monkeypatch.setattr("gracetune.cache.audit.MOST_COMPARED", 3)
    with store.writer() as writer:
        for side in range(32, 320, 32):
            writer.add(latent(replace(ref(0), bucket=Bucket(side, side))).origin, entry(0))
    calls: list[EntryOrigin] = []
    monkeypatch.setattr(
        "gracetune.cache.audit.differences", lambda one, other: calls.append(one) or differences(one, other)
    )
    (line,) = why_missing(lambda folder: store, [latent(ref(0), OTHER_VAE)])
    assert line == "1 latent encoded again: the VAE changed since they were cached"
    assert len(calls) == 3
