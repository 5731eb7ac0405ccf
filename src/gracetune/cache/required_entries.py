"""The entries that the caches must contain for a run: one item per entry. Pure.

items = wanted_latents(index, encoder_id, folders)      # and wanted_texts(...)
missing = [item for item in items if item.key not in store_of(item.folder)]

Most entries of a run already exist, and only their keys and visits are needed. Items are therefore small objects; the
inputs of an entry (`ref`, `origin`) are computed again when it has to be encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from gracetune.cache.encoder import EncoderId
from gracetune.cache.folders import CacheFolders
from gracetune.cache.keys import EntryOrigin, Key, latent_key, latent_origin, text_key, text_origin
from gracetune.cache.residence import Visits
from gracetune.config.run_config import Validation
from gracetune.data.index import NO_CAPTION, Appearance, DataIndex, freshness
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.refs import Bucket, SampleRef
from gracetune.data.text_format import counted
from gracetune.memory.reclaim import rare_collections

Part = Literal["all", "lasting", "epoch"]
"""Which entries: those valid for the whole run (`lasting`), those refreshed each epoch (`epoch`), or both."""

_SHOWN = 60
"""Characters of a text that a message shows."""


Uses = tuple[tuple[str, Visits], ...]
"""Dataset ids, and how often each dataset visits the entry in an epoch. Empty for validation prompts."""


@dataclass(slots=True, eq=False)
class LatentItem:
    """The latents of one appearance of a sample: one crop, flip and part of a clip."""

    key: Key
    folder: Path
    """The store of the entry."""
    uses: Uses
    encoder: EncoderId
    index: DataIndex
    dataset: DatasetIndex
    item: Item
    appearance: Appearance

    @property
    def ref(self) -> SampleRef:
        """The reference of the sample, without its caption."""
        return self.index.describe(self.dataset, self.item, self.appearance, NO_CAPTION)

    @property
    def origin(self) -> EntryOrigin:
        return latent_origin(self.ref, self.encoder)

    @property
    def what(self) -> str:
        ref = self.ref
        flips = [name for name, on in zip("xy", _flips(ref), strict=True) if on]
        flipped = f", flipped in {' and '.join(flips)}" if flips else ""
        start = f", from {ref.clip.start:g} s" if ref.clip is not None and ref.clip.start else ""
        return f"{ref.path} of {ref.dataset}{start}{flipped}"

    @property
    def shape(self) -> tuple[Bucket, ...]:
        """Samples of the same shape can be encoded in one batch."""
        return self.item.shape

    @property
    def volume(self) -> int:
        """Pixels of all frames, or audio samples per channel, with those of the references.

        The size of the entry is proportional to it.
        """
        return sum(_volume(bucket) for bucket in self.shape)

    @property
    def decoded_bytes(self) -> int:
        return sum(_decoded_bytes(bucket) for bucket in self.shape)


@dataclass(slots=True, eq=False)
class TextItem:
    """The embedding of one text, and of reference images if it depends on them."""

    key: Key
    folder: Path
    uses: Uses
    encoder: EncoderId
    text: str
    images: tuple[SampleRef, ...]

    @property
    def origin(self) -> EntryOrigin:
        return text_origin(self.text, self.encoder, self.images)

    @property
    def what(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        images = ", ".join(image.path for image in self.images)
        return f"{text!r} with {images}" if images else repr(text)

    @property
    def shape(self) -> tuple[Bucket, ...]:
        return tuple(image.bucket for image in self.images)

    @property
    def volume(self) -> int:
        return 1

    @property
    def decoded_bytes(self) -> int:
        return sum(_decoded_bytes(bucket) for bucket in self.shape)


CacheItem = TypeVar("CacheItem", bound=LatentItem | TextItem)


def wanted_latents(
    index: DataIndex, encoder: EncoderId, folders: CacheFolders, *, epoch: int = 0, part: Part = "all"
) -> list[LatentItem]:
    """The latents of an epoch. Datasets whose samples look different at every visit are not cached; see `left_out`."""
    found: dict[Path, dict[Key, LatentItem]] = {}
    with rare_collections():
        for dataset, is_trained, when in _cached(index, epoch, part):
            folder = folders.latents(dataset.id, when)
            by_key, uses_of = found.setdefault(folder, {}), _Uses(dataset, is_trained)
            for item in dataset.items:
                appearances = _appearances(when or 0, index.combinations(dataset, item))
                uses = uses_of(item.visits / len(appearances))
                for appearance in appearances:
                    key = latent_key(index.describe(dataset, item, appearance, NO_CAPTION), encoder)
                    if key in by_key:
                        by_key[key].uses = _joined(by_key[key].uses, uses)
                    else:
                        by_key[key] = LatentItem(key, folder, uses, encoder, index, dataset, item, appearance)
    return [item for items in found.values() for item in items.values()]


def wanted_texts(
    index: DataIndex,
    encoder: EncoderId,
    folders: CacheFolders,
    *,
    reads_images: bool = False,
    prompts: Iterable[str] = (),
    epoch: int = 0,
    part: Part = "all",
) -> list[TextItem]:
    """The embeddings of every caption that an epoch can use, of the dropped caption if captions are dropped, and of
    `prompts`.

    If an embedding depends on images, each caption has one embedding per appearance of the sample. Validation prompts
    have no images in the dataset; with an encoder that reads images they are embedded when samples are generated.
    """
    found: dict[Path, dict[Key, TextItem]] = {}

    def add(text: str, images: tuple[SampleRef, ...], folder: Path, uses: Uses) -> None:
        by_key = found.setdefault(folder, {})
        key = text_key(text, encoder, images)
        if key in by_key:
            by_key[key].uses = _joined(by_key[key].uses, uses)
        else:
            by_key[key] = TextItem(key, folder, uses, encoder, text, images)

    lasting, of_epoch = folders.text(), folders.text(epoch)
    with rare_collections():
        for dataset, is_trained in _datasets(index):
            has_images = reads_images and any(item.references for item in dataset.items)
            if has_images and freshness(dataset.dataset) == "visit":
                continue  # the images change at every visit, and so do the embeddings
            uses_of = _Uses(dataset, is_trained)
            for item in dataset.items:
                appearances = [*_images(index, dataset, item, epoch)] if has_images else _WITHOUT_IMAGES
                for images, when in appearances:
                    if part == "all" or (part == "epoch") == (when is not None):
                        for text, share in _texts(dataset, item):
                            uses = uses_of(item.visits / len(appearances) * share)
                            add(text, images, lasting if when is None else of_epoch, uses)
        if not reads_images and part != "epoch":
            for text in prompts:
                add(text, (), lasting, ())
    return [item for items in found.values() for item in items.values()]


def visits_of(
    items: Iterable[LatentItem | TextItem], is_counted: Callable[[str], bool] = lambda dataset: True
) -> dict[Key, Visits]:
    """How often an epoch reads each entry. `is_counted` selects datasets by id; other entries are left out."""
    found: dict[Key, Visits] = {}
    for item in items:
        for dataset, visits in item.uses:
            if is_counted(dataset):
                found[item.key] = found[item.key] + visits if item.key in found else visits
    return found


@lru_cache(maxsize=256)
def _appearances(variant: int, combinations: int) -> tuple[Appearance, ...]:
    return tuple(Appearance(variant, combination) for combination in range(combinations))


class _Uses:
    """Creates the `Uses` of one dataset's entries. Entries that are visited equally often share one object."""

    def __init__(self, dataset: DatasetIndex, is_trained: bool) -> None:
        self._dataset, self._is_trained = dataset.dataset, is_trained
        self._memo: dict[float, Uses] = {}

    def __call__(self, per_epoch: float) -> Uses:
        if per_epoch not in self._memo:
            visits = Visits(per_epoch if self._is_trained else 0.0, self._dataset.probability)
            self._memo[per_epoch] = ((self._dataset.id, visits),)
        return self._memo[per_epoch]


def _joined(one: Uses, other: Uses) -> Uses:
    """Add the uses of two appearances, datasets or captions that have the same entry."""
    found = dict(one)
    for dataset, visits in other:
        found[dataset] = found[dataset] + visits if dataset in found else visits
    return (*found.items(),)


def validation_texts(validation: Validation, *, default_negative: str = "") -> list[str]:
    """The distinct texts for the validation samples of a run. `default_negative` stands in for an absent negative
    prompt."""
    if not validation.enabled:
        return []
    texts: dict[str, None] = {}
    for prompt in validation.prompts:
        negative = validation.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
        texts |= {prompt.prompt: None, negative or default_negative: None}
    return [*texts]


def left_out(index: DataIndex) -> list[str]:
    """Notes on the datasets that are not cached, with reasons."""
    notes = []
    for dataset in (*index.datasets, *index.held_out):
        if freshness(dataset.dataset) != "visit":
            continue
        samples = counted(len(dataset.items), "sample")
        if dataset.dataset.cache_latents == "none":
            why = "cache_latents is none"
        else:
            why = (
                "augmentation.cache_mode is disable_cache, so its transforms are random at every visit; "
                "static augments once, refresh_each_epoch once per epoch"
            )
        notes.append(f"dataset {dataset.id}: latents of {samples} are encoded in every step: {why}")
    return notes


def is_refreshed(index: DataIndex) -> bool:
    """Whether any dataset has entries that are refreshed each epoch."""
    return any(freshness(one.dataset) == "epoch" for one in (*index.datasets, *index.held_out))


def by_folder(items: Iterable[CacheItem]) -> dict[Path, list[CacheItem]]:
    found: dict[Path, list[CacheItem]] = {}
    for item in items:
        found.setdefault(item.folder, []).append(item)
    return found


@dataclass(frozen=True)
class RequiredEntry:
    """An entry that the configuration needs."""

    origin: EntryOrigin
    what: str
    """A description for users: the file, or the beginning of the caption."""


def for_audit(items: Iterable[LatentItem | TextItem]) -> list[RequiredEntry]:
    return [RequiredEntry(item.origin, item.what) for item in items]


_WITHOUT_IMAGES: list[tuple[tuple[SampleRef, ...], int | None]] = [((), None)]


def _datasets(index: DataIndex) -> Iterator[tuple[DatasetIndex, bool]]:
    """All datasets, each with whether it is used for training."""
    yield from ((dataset, True) for dataset in index.datasets)
    yield from ((dataset, False) for dataset in index.held_out)


def _cached(index: DataIndex, epoch: int, part: Part) -> Iterator[tuple[DatasetIndex, bool, int | None]]:
    """Datasets with cached latents: dataset, whether it is used for training, and the epoch if refreshed."""
    for dataset, is_trained in _datasets(index):
        changes_each = freshness(dataset.dataset)
        if changes_each == "visit" or part == ("lasting" if changes_each == "epoch" else "epoch"):
            continue
        yield dataset, is_trained, epoch if changes_each == "epoch" else None


def _images(
    index: DataIndex, dataset: DatasetIndex, item: Item, epoch: int
) -> Iterator[tuple[tuple[SampleRef, ...], int | None]]:
    """The reference images of each appearance, and the epoch if they are refreshed."""
    changes_each_epoch = freshness(dataset.dataset) == "epoch"
    for appearance in _appearances(epoch if changes_each_epoch else 0, index.combinations(dataset, item)):
        ref = index.describe(dataset, item, appearance, NO_CAPTION)
        # Without references the embedding depends on the caption alone, which is not refreshed.
        yield ref.conditioning, epoch if changes_each_epoch and ref.conditioning else None


def _texts(dataset: DatasetIndex, item: Item) -> Iterator[tuple[str, float]]:
    """Each text of an item, with the share of the item's visits that use it."""
    options = dataset.dataset.captions
    for caption in item.captions:
        yield caption, (1 - options.dropout) / len(item.captions)
    if options.dropout > 0:
        yield options.dropped_caption, options.dropout


def _flips(ref: SampleRef) -> tuple[bool, bool]:
    return ref.augmentation.flip_x, ref.augmentation.flip_y


def _volume(bucket: Bucket) -> int:
    return bucket.audio_samples or bucket.width * bucket.height * bucket.frames


def _decoded_bytes(bucket: Bucket) -> int:
    """Bytes as float32: three color channels, or all audio channels."""
    return 4 * _volume(bucket) * (bucket.audio_channels if bucket.audio_samples else 3)
