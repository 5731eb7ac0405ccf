"""Entries encoded again one by one, compared with those of a batch. See docs/caches.md for the differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gracetune.cache.encode_passes import Flush
from gracetune.cache.errors import CorruptEntryError
from gracetune.cache.maintenance import recheck_suspects
from gracetune.cache.session import build
from gracetune.cache.store import DiskStore
from runs.made_runs import images
from unit.cache.samples import entry, is_entry, key, origin
from unit.cache.tiny_runs import FLAVOURS, Run, contents, datasets
from unit.data.folders import image, write

TinyModel = Callable[[str, str], Path]
MOST = 2e-6
"""Of the largest value of an entry; float32 has 1.2e-7."""


def run_of(family: str, tiny_model: TinyModel, root: Path, batch_size: int) -> Run:
    """A run with four samples of one shape."""
    found = datasets(family, root, 4)
    if family not in ("wan", "stable_audio"):
        found[0]["path"] = str(images(root / "same"))
    if family == "qwen_image":
        sources = {f"{number:02}.png": image(64, 64, seed=number) for number in range(4)}
        found[1]["path"] = str(write(root / "same sources", sources))
    cache = {"cache_dir": str(root / f"cache-{batch_size}"), "vae_batch_size": batch_size}
    return Run.of(
        root,
        family,
        tiny_model(family, FLAVOURS[family]),
        found,
        cache={**cache, "text_encoder_batch_size": batch_size},
    )


@pytest.mark.full
@pytest.mark.parametrize("family", FLAVOURS)
def test_an_entry_encoded_alone_equals_one_of_a_batch_but_for_rounding(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    made = []
    for batch_size in (1, 4):
        job = run_of(family, tiny_model, tmp_path, batch_size)
        with job.caches() as caches:
            built = build(job.config, job.index, job.encoders, caches)
        assert built.latents.batch_size == batch_size
        made.append(contents(job.folders.base / "latents", job.folders.base / "text"))
    alone, together = made
    assert alone.keys() == together.keys()
    for found, other in ((alone[name], together[name]) for name in alone):
        for name, tensor in found.items():
            worst = (tensor.float() - other[name].float()).abs().max() / tensor.float().abs().max().clamp_min(1e-9)
            assert float(worst) <= MOST, (family, name)


def test_what_could_not_be_read_for_a_moment_is_there_again(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store:
        with store.writer(Flush(entries=10)) as writer:
            for number in range(20):
                writer.add(origin(number), entry(number))
        place = store.catalogue.copies(key(3))[0]
        path = store.shards_folder / place.shard
        whole = path.read_bytes()
        path.write_bytes(whole[: place.start] + b"?" + whole[place.start + 1 :])
        with pytest.raises(CorruptEntryError):
            store.read(key(3))
        path.write_bytes(whole)
        assert recheck_suspects(store)
        assert not store.has_index, "nothing is lost, so there is nothing that the next start has to know"
        assert is_entry(store.read(key(3)), 3)
        assert not recheck_suspects(store), "each is told once"


def test_the_rest_of_a_damaged_file_is_checked_and_no_other(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store:
        with store.writer(Flush(entries=10)) as writer:
            for number in range(20):
                writer.add(origin(number), entry(number))
        damaged = [number for number in range(20) if number % 3 == 0]
        for number in damaged:
            place = store.catalogue.copies(key(number))[0]
            path = store.shards_folder / place.shard
            raw = bytearray(path.read_bytes())
            raw[place.start] ^= 1
            path.write_bytes(raw)
        with pytest.raises(CorruptEntryError):
            store.read(key(3))
        assert recheck_suspects(store)
        assert [number for number in range(10) if key(number) not in store] == [0, 3, 6, 9]
        assert all(key(number) in store for number in range(10, 20)), "nobody has met these yet"
    with DiskStore.open(tmp_path, writable=False) as again:
        assert [number for number in range(10) if key(number) not in again] == [0, 3, 6, 9], "the next start knows"
