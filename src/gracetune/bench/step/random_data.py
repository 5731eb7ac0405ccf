"""Random samples without files: an index for the loader, and cache entries with random values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from gracetune.bench.step.job import Entries, StepJob
from gracetune.bench.step.random_model import RandomModel
from gracetune.cache.batches import SampleKeys
from gracetune.cache.encoder import EncoderId
from gracetune.cache.keys import Key
from gracetune.cache.stats import StoreStats
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.media.probe import ImageFacts, VideoFacts
from gracetune.data.media_files import MediaFile
from gracetune.data.refs import Bucket
from gracetune.models.footprint import SampleShape
from gracetune.models.registry import geometry
from gracetune.train.data import CachedSamples

ENTRIES: Final = 4
"""Distinct entries of each kind, which all samples of an epoch share."""
_RATE: Final = 16.0


class RandomEntries:
    """Stands in for a resident cache: everything is in memory, page-locked for a GPU."""

    def __init__(self, shapes: Entries, *, seed: int, pinned: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._entries = [_entry(shapes, generator, pinned=pinned) for _ in range(ENTRIES)]
        self._numbers: dict[Key, int] = {}

    @property
    def stats(self) -> StoreStats:
        return StoreStats()

    def look_up(self, key: Key) -> Mapping[str, Tensor]:
        return self._entries[self._numbers.setdefault(key, len(self._numbers)) % ENTRIES]

    def read(self, key: Key) -> Mapping[str, Tensor]:
        return self.look_up(key)


def _entry(shapes: Entries, generator: torch.Generator, *, pinned: bool) -> dict[str, Tensor]:
    values = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    return {name: tensor.pin_memory() if pinned else tensor for name, tensor in values.items()}


def entry_shapes(job: StepJob, model: RandomModel) -> tuple[Entries, Entries]:
    """Shapes of a sample's latent entry and of its text entry."""
    preset = job.preset
    tokens = preset.footprint.text.tokens
    latents = {"latents": preset.latent_shape(job.shape), **preset.beside}
    return latents, preset.texts(model.denoiser_config, tokens)


def random_data(job: StepJob, config: RunConfig, model: RandomModel, *, pinned: bool) -> CachedSamples:
    latents, texts = entry_shapes(job, model)
    seed = config.training.seed
    return CachedSamples(
        index=_index(job, config, model),
        keys=SampleKeys(EncoderId("latent", "random", ()), EncoderId("text", "random", ())),
        latents=RandomEntries(latents, seed=seed, pinned=pinned),
        texts=RandomEntries(texts, seed=seed + 1, pinned=pinned),
    )


def _index(job: StepJob, config: RunConfig, model: RandomModel) -> DataIndex:
    shape = job.shape
    bucket = Bucket(shape.width, shape.height, shape.frames)
    facts = _facts(shape)
    count = ENTRIES * job.batch
    items = tuple(
        Item(MediaFile(f"{number}", 1, f"{number:032x}", facts), bucket, captions=(f"sample {number}",))
        for number in range(count)
    )
    dataset = DatasetIndex(0, config.datasets[0], items)
    data_geometry = geometry(model.facts.family, model.facts.flavour)
    return DataIndex(config.training.seed, data_geometry, (dataset,), (), {})


def _facts(shape: SampleShape) -> ImageFacts | VideoFacts:
    if shape.frames == 1:
        return ImageFacts(shape.width, shape.height, False)
    return VideoFacts(shape.width, shape.height, shape.frames, shape.frames / _RATE)


def random_batch(job: StepJob, model: RandomModel, device: torch.device | str, *, seed: int = 0) -> dict[str, Tensor]:
    """One whole batch on the device, for callers without a batch source."""
    on_meta = torch.device(device).type == "meta"
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for shapes in entry_shapes(job, model):
        for name, shape in shapes.items():
            whole = (job.batch, *shape)
            values = torch.empty(whole, device="meta") if on_meta else torch.randn(whole, generator=generator)
            batch[name] = values.to(device, torch.bfloat16)
    return batch
