"""Everything the caches have to hold for a run: one item for each entry, each entry once. Pure.

items = wanted_latents(index, encoder_id, places)       # and wanted_texts(...)
missing = [item for item in items if item.key not in store_of(item.folder)]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from gracetune.cache.audit import Wanted
from gracetune.cache.encoder import EncoderId
from gracetune.cache.keys import Key, Origin, latent_origin, text_origin
from gracetune.cache.places import Places
from gracetune.config.run_config import Validation
from gracetune.data.index import NO_CAPTION, DataIndex, Turn, freshness
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.refs import Bucket, SampleRef
from gracetune.data.words import counted

Part = Literal["all", "lasting", "epoch"]
"""What stays right for the whole run, what is drawn anew for each epoch, or both."""

_SHOWN = 60


@dataclass(frozen=True)
class LatentItem:
    """Latents of one appearance of a sample."""

    ref: SampleRef
    """Its caption is left empty."""
    origin: Origin
    key: Key
    folder: Path
    """Of the store the entry belongs to."""

    @property
    def what(self) -> str:
        flips = [name for name, on in zip("xy", _flips(self.ref), strict=True) if on]
        flipped = f", flipped in {' and '.join(flips)}" if flips else ""
        clip = self.ref.clip
        piece = f", from {clip.start:g} s" if clip is not None and clip.start else ""
        return f"{self.ref.path} of {self.ref.dataset}{piece}{flipped}"

    @property
    def shape(self) -> tuple[Bucket, ...]:
        """Samples of one shape are encoded together."""
        return (self.ref.bucket, *(one.bucket for one in self.ref.conditioning))

    @property
    def volume(self) -> int:
        """What an entry's size is in proportion to."""
        return sum(_volume(bucket) for bucket in self.shape)

    @property
    def decoded_bytes(self) -> int:
        return sum(_decoded(bucket) for bucket in self.shape)


@dataclass(frozen=True)
class TextItem:
    """The embedding of one text, with pictures where it depends on them."""

    text: str
    pictures: tuple[SampleRef, ...]
    origin: Origin
    key: Key
    folder: Path

    @property
    def what(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        seen = ", ".join(picture.path for picture in self.pictures)
        return f"{text!r} with {seen}" if seen else repr(text)

    @property
    def shape(self) -> tuple[Bucket, ...]:
        return tuple(picture.bucket for picture in self.pictures)

    @property
    def volume(self) -> int:
        return 1

    @property
    def decoded_bytes(self) -> int:
        return sum(_decoded(bucket) for bucket in self.shape)


CacheItem = TypeVar("CacheItem", bound=LatentItem | TextItem)


def wanted_latents(
    index: DataIndex, encoder: EncoderId, places: Places, *, epoch: int = 0, part: Part = "all"
) -> list[LatentItem]:
    """For an epoch. Datasets whose samples look different at every visit are not cached: see `left_out`."""
    found: dict[Hashable, LatentItem] = {}
    for dataset, when in _cached(index, epoch, part):
        folder = places.latents(dataset.id, when)
        for item in dataset.items:
            for ref in _appearances(index, dataset, item, when or 0):
                origin = latent_origin(ref, encoder)
                key = origin.key
                found.setdefault((folder, key), LatentItem(ref, origin, key, folder))
    return [*found.values()]


def wanted_texts(
    index: DataIndex,
    encoder: EncoderId,
    places: Places,
    *,
    reads_pictures: bool = False,
    prompts: Iterable[str] = (),
    epoch: int = 0,
    part: Part = "all",
) -> list[TextItem]:
    """Every caption an epoch can draw, that of a dropped one where captions are dropped, and `prompts`.

    Where an embedding depends on pictures it is one for every caption of every appearance of a sample. Prompts have no
    such pictures among the data: with an encoder that reads pictures they are embedded when they are drawn.
    """
    found: dict[Hashable, TextItem] = {}

    def add(text: str, pictures: tuple[SampleRef, ...], folder: Path) -> None:
        origin = text_origin(text, encoder, pictures)
        key = origin.key
        found.setdefault((folder, key), TextItem(text, pictures, origin, key, folder))

    for dataset in (*index.datasets, *index.held_out):
        seen = reads_pictures and any(item.references for item in dataset.items)
        if seen and freshness(dataset.dataset) == "visit":
            continue  # the pictures are new at every visit, and so are the embeddings
        for item in dataset.items:
            for pictures, when in _pictures(index, dataset, item, epoch) if seen else [((), None)]:
                if part == "all" or (part == "epoch") == (when is not None):
                    for text in _texts(dataset, item):
                        add(text, pictures, places.text(when))
    if not reads_pictures and part != "epoch":
        for text in prompts:
            add(text, (), places.text())
    return [*found.values()]


def validation_texts(validation: Validation, *, no_wish: str = "") -> list[str]:
    """Every text the samples of a run are drawn with, each once. `no_wish` is what stands for no negative prompt."""
    if not validation.enabled:
        return []
    texts: dict[str, None] = {}
    for prompt in validation.prompts:
        negative = validation.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
        texts |= {prompt.prompt: None, negative or no_wish: None}
    return [*texts]


def left_out(index: DataIndex) -> list[str]:
    """What is not cached, and why, in words."""
    notes = []
    for dataset in (*index.datasets, *index.held_out):
        if freshness(dataset.dataset) != "visit":
            continue
        samples = counted(len(dataset.items), "sample")
        if dataset.dataset.cache_latents == "none":
            why = "cache_latents is none"
        else:
            why = (
                "augmentation.cache_mode is disable_cache, and its transforms change every visit; "
                "static augments once, refresh_each_epoch once an epoch"
            )
        notes.append(f"dataset {dataset.id}: latents of {samples} are encoded in every step: {why}")
    return notes


def is_refreshed(index: DataIndex) -> bool:
    """Whether any entries are drawn anew for each epoch."""
    return any(freshness(one.dataset) == "epoch" for one in (*index.datasets, *index.held_out))


def by_folder(items: Iterable[CacheItem]) -> dict[Path, list[CacheItem]]:
    found: dict[Path, list[CacheItem]] = {}
    for item in items:
        found.setdefault(item.folder, []).append(item)
    return found


def for_audit(items: Iterable[LatentItem | TextItem]) -> list[Wanted]:
    return [Wanted(item.origin, item.what) for item in items]


def _cached(index: DataIndex, epoch: int, part: Part) -> Iterator[tuple[DatasetIndex, int | None]]:
    """Datasets whose latents are cached, and the epoch they are cached for, if only for one."""
    for dataset in (*index.datasets, *index.held_out):
        kept = freshness(dataset.dataset)
        if kept == "visit" or part == ("lasting" if kept == "epoch" else "epoch"):
            continue
        yield dataset, epoch if kept == "epoch" else None


def _appearances(index: DataIndex, dataset: DatasetIndex, item: Item, variant: int) -> Iterator[SampleRef]:
    for count in range(index.appearances(dataset, item)):
        yield index.describe(dataset, item, Turn(variant, count), NO_CAPTION)


def _pictures(
    index: DataIndex, dataset: DatasetIndex, item: Item, epoch: int
) -> Iterator[tuple[tuple[SampleRef, ...], int | None]]:
    anew = freshness(dataset.dataset) == "epoch"
    for ref in _appearances(index, dataset, item, epoch if anew else 0):
        # Without references nothing is drawn that the embedding could depend on.
        yield ref.conditioning, epoch if anew and ref.conditioning else None


def _texts(dataset: DatasetIndex, item: Item) -> Iterator[str]:
    yield from item.captions
    if dataset.dataset.captions.dropout > 0:
        yield dataset.dataset.captions.dropped_caption


def _flips(ref: SampleRef) -> tuple[bool, bool]:
    return ref.augmentation.flip_x, ref.augmentation.flip_y


def _volume(bucket: Bucket) -> int:
    return bucket.audio_samples or bucket.width * bucket.height * bucket.frames


def _decoded(bucket: Bucket) -> int:
    """float32: three colours, or every channel of a sound."""
    return 4 * _volume(bucket) * (bucket.audio_channels if bucket.audio_samples else 3)
