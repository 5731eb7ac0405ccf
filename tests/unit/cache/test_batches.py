from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gracetune.cache.batches import Batch, BatchSource, LiveEncoder, SampleKeys
from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.cache.errors import CacheError, CorruptEntryError, MissingEntryError
from gracetune.cache.keys import text_key
from gracetune.cache.store import DiskStore
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.data.media.load import Sample
from gracetune.data.refs import BatchRef
from unit.cache.sample_caches import (
    CPU,
    KEYS,
    LATENT,
    TEXT,
    fill,
    latent_entry,
    places_of,
    resident,
    source_of,
    text_entry,
)
from unit.data.folders import image, images, index_of, made_up, write

Outcome = Batch | EpochEnd | Exhausted
Entry = dict[str, Tensor]

TWO_DATASETS: tuple[dict[str, Any], ...] = (
    {"counts": [5, 3], "repeats": 1, "cache_latents": "disk", "captions": {"dropout": 0.4}},
    {"counts": [2, 4], "cache_latents": "disk", "probability": 3.0, "augmentation": {"flip_x": True}},
)


@pytest.fixture(scope="module")
def index() -> DataIndex:
    return made_up(*TWO_DATASETS)


@pytest.fixture(scope="module")
def disk(index: DataIndex, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskStore]:
    with fill(tmp_path_factory.mktemp("batches") / "cache", index) as store:
        yield store


def assert_right(batch: Batch, keys: SampleKeys = KEYS) -> None:
    """Compare each tensor with the content that its key determines."""
    longest = max(len(text_entry(keys.of_text(ref))["prompt_embeds"]) for ref in batch.ref.samples)
    assert batch.tensors["prompt_embeds"].shape[:2] == (len(batch.ref.samples), longest)
    for number, ref in enumerate(batch.ref.samples):
        latent, text = latent_entry(ref, keys.of_latent(ref)), text_entry(keys.of_text(ref))
        assert torch.equal(batch.tensors["latents"][number], latent["latents"])
        length = len(text["prompt_embeds"])
        assert torch.equal(batch.tensors["prompt_embeds"][number, :length], text["prompt_embeds"])
        assert not batch.tensors["prompt_embeds"][number, length:].any()
        if "loss_mask" in batch.tensors:
            ones = torch.ones_like(batch.tensors["loss_mask"][number])
            assert torch.equal(batch.tensors["loss_mask"][number], latent.get("loss_mask", ones))


def taken(source: BatchSource, sizes: Sequence[int | None], count: int, first: int = 0) -> list[Outcome]:
    """Copy the tensors, because a batch is valid only until the next one is requested."""
    outcomes: list[Outcome] = []
    for call in range(first, first + count):
        outcome = source.next(sizes[call % len(sizes)])
        if isinstance(outcome, Batch):
            outcome = Batch(outcome.ref, {name: tensor.clone() for name, tensor in outcome.tensors.items()})
        outcomes.append(outcome)
    return outcomes


def assert_same(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        if not isinstance(one, Batch):
            assert one == two
            continue
        assert isinstance(two, Batch)
        assert one.ref == two.ref
        assert one.tensors.keys() == two.tensors.keys()
        assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)


@settings(max_examples=20)
@given(
    depth=st.integers(0, 4),
    sizes=st.lists(st.sampled_from([None, 1, 2, 3, 5]), min_size=1, max_size=4),
    budget=st.sampled_from([None, 0, 3000]),
)
def test_look_ahead_changes_nothing(
    index: DataIndex, disk: DiskStore, depth: int, sizes: list[int | None], budget: int | None
) -> None:
    """Across two epoch ends, with any sequence of batch sizes, wherever the entries are."""
    calls = 60
    plain_stores, stores = resident(disk, index), resident(disk, index, budget=budget)
    with source_of(Loader(index, batch_size=2, epochs=2), plain_stores, depth=0) as plain:
        expected = taken(plain, sizes, calls)
    with source_of(Loader(index, batch_size=2, epochs=2), stores, depth=depth) as source:
        found = taken(source, sizes, calls)
    assert_same(found, expected)
    assert sum(isinstance(one, EpochEnd) for one in found) == 2
    assert isinstance(found[-1], Exhausted)
    for one in found:
        if isinstance(one, Batch):
            assert_right(one)
    for store in (*plain_stores, *stores):
        store.close()


@settings(max_examples=15)
@given(
    before=st.integers(0, 12),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    depths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_saved_state_goes_on_with_the_same_batches(
    index: DataIndex, disk: DiskStore, before: int, sizes: list[int], depths: tuple[int, int]
) -> None:
    """Prefetched batches are not part of the state; a resumed run fetches them again."""
    stores = resident(disk, index)
    loader = Loader(index, batch_size=2)
    with source_of(loader, stores, depth=depths[0]) as source:
        taken(source, sizes, before)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = taken(source, sizes, 10, first=before)
    resumed = Loader(index, batch_size=2)
    resumed.load_state_dict(state)
    with source_of(resumed, stores, depth=depths[1]) as source:
        assert_same(taken(source, sizes, 10, first=before), expected)


def test_the_state_is_that_of_a_loader_alone(index: DataIndex, disk: DiskStore) -> None:
    loader, alone = Loader(index, batch_size=3), Loader(index, batch_size=3)
    with source_of(loader, resident(disk, index), depth=4) as source:
        for _ in range(30):
            source.next()
            alone.next_batch()
            assert loader.state_dict() == alone.state_dict()


def test_another_size_discards_what_was_foreseen(index: DataIndex, disk: DiskStore) -> None:
    with source_of(Loader(index, batch_size=2), resident(disk, index), depth=3) as source:
        taken(source, [2], 3)
        assert source.stats.discarded == 0
        taken(source, [1], 1)
        assert source.stats.discarded == 3
        assert (source.stats.batches, source.stats.samples) == (4, 7)


def test_a_step_that_ends_a_dataset_discards_too(tmp_path: Path) -> None:
    index = made_up({"counts": [6], "cache_latents": "disk", "end_step": 2}, {"counts": [6], "cache_latents": "disk"})
    with fill(tmp_path / "cache", index) as disk:
        outcomes = []
        for depth in (0, 3):
            with source_of(Loader(index, batch_size=1), resident(disk, index), depth=depth) as source:
                outcomes.append([source.next(step=step) for step in range(6)])
        refs = [[one.ref for one in some if isinstance(one, Batch)] for some in outcomes]
        assert refs[0] == refs[1]
        assert {ref.samples[0].dataset for ref in refs[0][2:]} == {"d1"}


def test_a_dropped_caption_is_the_cached_empty_prompt(index: DataIndex, disk: DiskStore) -> None:
    empty = text_entry(text_key("", TEXT))["prompt_embeds"]
    dropped = 0
    with source_of(Loader(index, batch_size=1, epochs=3), resident(disk, index)) as source:
        while not isinstance(outcome := source.next(), Exhausted):
            if isinstance(outcome, Batch) and outcome.ref.samples[0].caption.dropped:
                assert torch.equal(outcome.tensors["prompt_embeds"][0], empty)
                dropped += 1
    assert dropped > 5


def test_a_step_may_write_into_its_batch(index: DataIndex, disk: DiskStore) -> None:
    with source_of(Loader(index, batch_size=1, epochs=2), resident(disk, index)) as source:
        while not isinstance(outcome := source.next(), Exhausted):
            if isinstance(outcome, Batch):
                assert_right(outcome)
                for tensor in outcome.tensors.values():
                    tensor.zero_()


def test_a_batch_can_be_trained_on_even_if_validation_asked_for_it(index: DataIndex, disk: DiskStore) -> None:
    with source_of(Loader(index, batch_size=2), resident(disk, index)) as source, torch.inference_mode():
        source.next()
        batch = source.next()
    assert isinstance(batch, Batch)
    assert not batch.tensors["latents"].is_inference()


def test_counts(index: DataIndex, disk: DiskStore) -> None:
    stores = resident(disk, index, budget=1500)
    with source_of(Loader(index, batch_size=2, epochs=1), stores) as source:
        while not isinstance(source.next(), Exhausted):
            pass
        found = source.all_stats()
    visits = 2 * 8 + 6
    assert found["cache.samples"] == visits
    assert found["cache.latents.hits"] + found["cache.latents.disk_reads"] == visits
    assert 0 < found["cache.latents.hit_rate"] < 1
    assert found["cache.latents.disk_seconds"] > 0
    assert found["cache.host_ms"] > 0
    assert found["cache.wait_ms"] > 0, "waiting for the disk"


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 3])
def test_a_damaged_entry_raises_in_its_turn_and_comes_once_it_is_mended(tmp_path: Path, depth: int) -> None:
    index = made_up({"counts": [8], "cache_latents": "disk"})
    expected = [one for one in Loader(index, batch_size=1).peek(8) if isinstance(one, BatchRef)]
    with fill(tmp_path / "cache", index) as disk:
        bad = KEYS.of_latent(expected[5].samples[0])
        [place] = places_of(disk.locate([bad]))
        path = disk.shards_folder / place.shard
        raw = bytearray(path.read_bytes())
        raw[place.start + 3] ^= 4
        path.write_bytes(raw)
        stores = resident(disk, index)
        assert stores[0].report.damaged == (bad,)
        loader = Loader(index, batch_size=1)
        with source_of(loader, stores, depth=depth) as source:
            got = [source.next() for _ in range(5)]
            state = loader.state_dict()
            for _ in range(2):
                with pytest.raises((CorruptEntryError, MissingEntryError), match=bad) as caught:
                    source.next()
                assert f"{expected[5].samples[0].path} of {expected[5].samples[0].dataset} (entry" in str(caught.value)
                assert loader.state_dict() == state, "the loader has not moved"
            with disk.writer() as writer:
                from gracetune.cache.keys import latent_origin

                sample = expected[5].samples[0]
                writer.add(latent_origin(sample, LATENT), latent_entry(sample, bad))
            got += [source.next() for _ in range(3)]
        assert [one.ref for one in got if isinstance(one, Batch)] == expected


def test_entries_of_the_next_epoch_may_come_late(tmp_path: Path) -> None:
    """refresh_each_epoch: an entry that was looked up too early is looked up again when it is needed."""
    flipped = {"transforms": [{"method": "ColorJitter"}], "cache_mode": "refresh_each_epoch"}
    write(tmp_path / "files", images(4))
    index = index_of(tmp_path, {"path": str(tmp_path / "files"), "cache_latents": "disk", "augmentation": flipped})
    with fill(tmp_path / "cache", index) as disk:
        loader = Loader(index, batch_size=1, epochs=2)
        with source_of(loader, resident(disk, index), depth=3) as source:
            first = [source.next() for _ in range(4)]
            assert isinstance(source.next(), EpochEnd)
            with pytest.raises(MissingEntryError):
                source.next()
            fill(tmp_path / "cache", index, epochs=2).close()
            second = [source.next() for _ in range(4)]
    variants = [
        {one.ref.samples[0].augmentation.epoch for one in some if isinstance(one, Batch)} for some in (first, second)
    ]
    assert variants == [{0}, {1}]


def test_other_stores_can_be_used_from_a_batch_on(index: DataIndex, disk: DiskStore) -> None:
    with source_of(Loader(index, batch_size=2, epochs=1), resident(disk, index), depth=0) as plain:
        expected = taken(plain, [None], 11)
    old, new = resident(disk, index), resident(disk, index)
    with source_of(Loader(index, batch_size=2, epochs=1), old, depth=3) as source:
        found = taken(source, [None], 4)
        source.use(latents=new[0], texts=new[1])
        for store in old:
            store.close()
        found += taken(source, [None], 7)
    assert_same(found, expected)
    samples = sum(len(one.ref.samples) for one in found[4:] if isinstance(one, Batch))
    assert [store.stats.hits for store in new] == [samples, samples], "nothing that was gathered from the old ones"


# -- what is not cached ------------------------------------------------------------------------------------------------


class Halves:
    """A working latent encoder: it returns every eighth pixel of the image."""

    def __init__(self) -> None:
        self.id = EncoderId("latent", "halves", ())

    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        return [{"latents": sample.pixels[:, ::8, ::8].clone()} for sample in samples if sample.pixels is not None]

    def save_memory(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Reader:
    """A text encoder that reads the images."""

    reads_images = True

    def __init__(self) -> None:
        self.id = TEXT

    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        found: list[Entry] = []
        for prompt in prompts:
            means = [float(one.pixels.mean()) for one in prompt.images if one.pixels is not None]
            found.append({"prompt_embeds": torch.tensor([[float(len(prompt.text)), *means]])})
        return found

    def close(self) -> None:
        pass


def uncached(tmp_path: Path, count: int = 6) -> DataIndex:
    write(tmp_path / "files", images(count))
    return index_of(
        tmp_path,
        {"path": str(tmp_path / "files"), "cache_latents": "none", "crop": {"enabled": True}, "corrupt_threshold": 0.5},
    )


def live_source(loader: Loader, disk: DiskStore, index: DataIndex, *, depth: int, live: LiveEncoder) -> BatchSource:
    latents, texts = resident(disk, index)
    return BatchSource(loader, latents=latents, texts=texts, keys=KEYS, device=CPU, depth=depth, live=live)


@pytest.mark.parametrize("depth", [0, 2])
def test_what_is_not_cached_is_decoded_ahead_and_encoded(tmp_path: Path, depth: int) -> None:
    index = uncached(tmp_path)
    with fill(tmp_path / "cache", index) as disk:
        loader = Loader(index, batch_size=2, epochs=2)
        samples = 0
        with live_source(loader, disk, index, depth=depth, live=LiveEncoder(Halves())) as source:
            while not isinstance(outcome := source.next(), Exhausted):
                if isinstance(outcome, EpochEnd):
                    continue
                for number, ref in enumerate(outcome.ref.samples):
                    pixels = index.load(ref).pixels
                    assert pixels is not None
                    assert torch.equal(outcome.tensors["latents"][number], pixels[:, ::8, ::8])
                    samples += 1
            stats = source.stats
    assert samples == 12
    assert stats.live_samples >= 12
    assert stats.live_seconds > 0


def test_without_an_encoder_the_error_comes_at_once(tmp_path: Path) -> None:
    index = uncached(tmp_path)
    with (
        fill(tmp_path / "cache", index) as disk,
        pytest.raises(CacheError, match=r"latents of dataset d0(.|\n)*cache_latents: none(.|\n)*cache_mode: static"),
    ):
        live_source(Loader(index, batch_size=2), disk, index, depth=2, live=LiveEncoder())


def test_a_damaged_file_raises_in_its_turn_and_can_be_excluded(tmp_path: Path) -> None:
    index = uncached(tmp_path)
    (tmp_path / "files" / "003.png").write_bytes(image(128, 64, seed=3)[:200])
    seen: list[str] = []
    with fill(tmp_path / "cache", index) as disk:
        loader = Loader(index, batch_size=1, epochs=1)
        with live_source(loader, disk, index, depth=3, live=LiveEncoder(Halves())) as source:
            while True:
                try:
                    outcome = source.next()
                except UnreadableMediaError as error:
                    loader.exclude({"d0": {"003.png": str(error)}})
                    continue
                if isinstance(outcome, Exhausted):
                    break
                if isinstance(outcome, Batch):
                    seen += [ref.path for ref in outcome.ref.samples]
    assert sorted(seen) == ["000.png", "001.png", "002.png", "004.png", "005.png"]


# -- edit models -------------------------------------------------------------------------------------------------------


def edit_pairs(tmp_path: Path, **options: Any) -> DataIndex:
    write(tmp_path / "targets", images(3))
    write(tmp_path / "sources", {f"{number:03}.png": image(64, 64, seed=20 + number) for number in range(3)})
    return index_of(
        tmp_path,
        {"path": str(tmp_path / "targets"), "conditioning": ["d1"], "cache_latents": "disk", **options},
        {"path": str(tmp_path / "sources"), "dataset_type": "conditioning"},
    )


def test_the_text_key_of_an_edit_model_includes_the_images(tmp_path: Path) -> None:
    keys = SampleKeys(LATENT, TEXT, reads_images=True)
    index = edit_pairs(tmp_path, captions={"dropout": 0.5})
    with fill(tmp_path / "cache", index, keys=keys) as disk:
        stores = resident(disk, index, keys=keys)
        assert stores[1].report.missing == 0
        with source_of(Loader(index, batch_size=1, epochs=4), stores, keys=keys) as source:
            while not isinstance(outcome := source.next(), Exhausted):
                if isinstance(outcome, Batch):
                    assert_right(outcome, keys)
                    (ref,) = outcome.ref.samples
                    assert keys.of_text(ref) != text_key(ref.caption.text, TEXT)
                    assert "conditioning_latents_0" in outcome.tensors
        assert stores[1].stats.disk_reads == 0, "every embedding was foreseen"


def test_embeddings_of_images_that_are_not_cached_are_made_live(tmp_path: Path) -> None:
    keys = SampleKeys(LATENT, TEXT, reads_images=True)
    index = edit_pairs(tmp_path, cache_latents="none")
    with fill(tmp_path / "cache", index, keys=keys) as disk:
        latents, texts = resident(disk, index, keys=keys)
        options = {"latents": latents, "texts": texts, "keys": keys, "device": CPU}
        with pytest.raises(CacheError, match=r"text embeddings[\s\S]*expected +a text encoder"):
            BatchSource(Loader(index, batch_size=1), live=LiveEncoder(Halves()), **options)  # type: ignore[arg-type]
        loader = Loader(index, batch_size=1, epochs=1)
        with BatchSource(loader, live=LiveEncoder(Halves(), Reader()), **options) as source:  # type: ignore[arg-type]
            batch = source.next()
            assert isinstance(batch, Batch)
            (ref,) = batch.ref.samples
            pixels = index.load(ref).conditioning[0].pixels
            assert isinstance(pixels, Tensor)
            expected = torch.tensor([[[float(len(ref.caption.text)), float(pixels.mean())]]])
            assert torch.equal(batch.tensors["prompt_embeds"], expected)
