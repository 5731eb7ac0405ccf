"""Caches of synthetic samples. The content of each entry is a function of its key, so a mix-up is always detected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from gracetune.cache.batches import BatchSource, SampleKeys
from gracetune.cache.encoder import EncoderId
from gracetune.cache.folders import CacheFolders
from gracetune.cache.keys import Key, latent_origin, text_origin
from gracetune.cache.manifest import EntryCopy
from gracetune.cache.reading import LocatedEntries
from gracetune.cache.required_entries import visits_of, wanted_latents, wanted_texts
from gracetune.cache.residence import CacheResources, CacheType, Visits
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.data.index import DataIndex
from gracetune.data.loader import Loader
from gracetune.data.refs import SampleRef
from gracetune.hardware import Machine, probe

LATENT = EncoderId("latent", "weights-of-a-vae", (("dtype", "bf16"),))
TEXT = EncoderId("text", "weights-of-a-text-model", (("dtype", "bf16"),))
KEYS = SampleKeys(LATENT, TEXT)
CPU = torch.device("cpu")
WIDTH = 6

_machines: list[Machine] = []


def this_machine() -> Machine:
    if not _machines:
        _machines.append(probe())
    return _machines[0]


def numbers(text: str, *shape: int) -> Tensor:
    """Numbers derived from a text, the same in every process."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(text.encode()) % (1 << 62))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def latent_entry(ref: SampleRef, key: Key) -> dict[str, Tensor]:
    entry = {"latents": numbers(key, 4, ref.bucket.height // 8, ref.bucket.width // 8)}
    if int(key[0], 16) % 2:  # some samples have a mask
        entry["loss_mask"] = numbers(key + "mask", 1, ref.bucket.height // 8, ref.bucket.width // 8).float()
    for number, other in enumerate(ref.conditioning):
        entry[f"conditioning_latents_{number}"] = numbers(key + str(number), 4, other.bucket.height // 8, 3)
    return entry


def text_entry(key: Key) -> dict[str, Tensor]:
    return {
        "prompt_embeds": numbers(key, 1 + int(key[:2], 16) % 5, WIDTH),
        "pooled_prompt_embeds": numbers(key + "pooled", WIDTH),
    }


def fill(folder: Path, index: DataIndex, *, epochs: int = 1, keys: SampleKeys = KEYS) -> DiskStore:
    """A store with all entries that the index needs. The caller closes it."""
    store = DiskStore.open(folder, writable=True)
    with store.writer(Flush(entries=7)) as writer:
        refs = [ref for epoch in range(epochs) for ref in index.cacheable(epoch)]
        for ref in refs:
            origin = latent_origin(ref, keys.latent)
            writer.add(origin, latent_entry(ref, origin.key))
        images: Iterable[tuple[SampleRef, ...]] = {ref.conditioning for ref in refs} if keys.reads_images else [()]
        for text in index.captions():
            for some in images:
                text_of = text_origin(text, keys.text, some)
                writer.add(text_of, text_entry(text_of.key))
    return store


ANYWHERE = CacheFolders(Path(), Path(), {})


def latent_visits(index: DataIndex, encoder: EncoderId, epoch: int = 0) -> dict[Key, Visits]:
    return visits_of(wanted_latents(index, encoder, ANYWHERE, epoch=epoch))


def text_visits(
    index: DataIndex, encoder: EncoderId, *, reads_images: bool = False, epoch: int = 0
) -> dict[Key, Visits]:
    return visits_of(wanted_texts(index, encoder, ANYWHERE, reads_images=reads_images, epoch=epoch))


def resident(
    store: DiskStore,
    index: DataIndex,
    kind: CacheType = "memory",
    *,
    keys: SampleKeys = KEYS,
    budget: int | None = None,
) -> tuple[ResidentStore, ResidentStore]:
    resources = CacheResources(this_machine())
    latents = load_resident(
        [store], latent_visits(index, keys.latent), name="latents", role="latent_cache", kind=kind, resources=resources,
        budget=budget,
    )  # fmt: skip
    texts = load_resident(
        [store], text_visits(index, keys.text, reads_images=keys.reads_images), name="texts", role="text_cache",
        kind=kind, resources=resources, budget=budget,
    )  # fmt: skip
    return latents, texts


def source_of(
    loader: Loader, stores: tuple[ResidentStore, ResidentStore], *, depth: int = 2, keys: SampleKeys = KEYS
) -> BatchSource:
    return BatchSource(loader, latents=stores[0], texts=stores[1], keys=keys, device=CPU, depth=depth)


def places_of(located: LocatedEntries) -> list[EntryCopy]:
    """The location of each entry, to read or damage its file."""
    table = located.table
    columns = (table.shard.tolist(), located.layouts, table.start.tolist(), table.checksum.tolist())
    return [EntryCopy(located.files[shard], *rest) for shard, *rest in zip(*columns, strict=True)]
