"""Everything the caches have to hold for a run: one item for each entry, each entry once. Pure.

items = wanted_latents(index, encoder_id, places)       # and wanted_texts(...)
missing = [item for item in items if item.key not in store_of(item.folder)]

A run has an item for every entry, and most of them are there already: of those only keys and visits are asked. So an
item is one small object. What an entry is made of (`ref`, `origin`) is put together again when it has to be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from gracetune.cache.audit import Wanted
from gracetune.cache.encoder import EncoderId
from gracetune.cache.keys import Key, Origin, latent_key, latent_origin, text_key, text_origin
from gracetune.cache.places import Places
from gracetune.cache.residence import Visits
from gracetune.config.run_config import Validation
from gracetune.data.index import NO_CAPTION, DataIndex, Turn, freshness
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.refs import Bucket, SampleRef
from gracetune.data.words import counted
from gracetune.memory.reclaim import rare_collections

Part = Literal["all", "lasting", "epoch"]
"""What stays right for the whole run, what is drawn anew for each epoch, or both."""

_SHOWN = 60


Uses = tuple[tuple[str, Visits], ...]
"""Dataset ids, and how often each of them visits the entry in an epoch. Empty: validation prompts."""


@dataclass(slots=True, eq=False)
class LatentItem:
    """Latents of one appearance of a sample."""

    key: Key
    folder: Path
    """Of the store the entry belongs to."""
    uses: Uses
    encoder: EncoderId
    index: DataIndex
    dataset: DatasetIndex
    item: Item
    turn: Turn

    @property
    def ref(self) -> SampleRef:
        """Its caption is left empty."""
        return self.index.describe(self.dataset, self.item, self.turn, NO_CAPTION)

    @property
    def origin(self) -> Origin:
        return latent_origin(self.ref, self.encoder)

    @property
    def what(self) -> str:
        ref = self.ref
        flips = [name for name, on in zip("xy", _flips(ref), strict=True) if on]
        flipped = f", flipped in {' and '.join(flips)}" if flips else ""
        piece = f", from {ref.clip.start:g} s" if ref.clip is not None and ref.clip.start else ""
        return f"{ref.path} of {ref.dataset}{piece}{flipped}"

    @property
    def shape(self) -> tuple[Bucket, ...]:
        """Samples of one shape are encoded together."""
        return self.item.shape

    @property
    def volume(self) -> int:
        """What an entry's size is in proportion to."""
        return sum(_volume(bucket) for bucket in self.shape)

    @property
    def decoded_bytes(self) -> int:
        return sum(_decoded(bucket) for bucket in self.shape)


@dataclass(slots=True, eq=False)
class TextItem:
    """The embedding of one text, with pictures where it depends on them."""

    key: Key
    folder: Path
    uses: Uses
    encoder: EncoderId
    text: str
    pictures: tuple[SampleRef, ...]

    @property
    def origin(self) -> Origin:
        return text_origin(self.text, self.encoder, self.pictures)

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
    found: dict[Path, dict[Key, LatentItem]] = {}
    with rare_collections():
        for dataset, trained, when in _cached(index, epoch, part):
            folder = places.latents(dataset.id, when)
            there, uses_of = found.setdefault(folder, {}), _Uses(dataset, trained)
            for item in dataset.items:
                turns = _turns(when or 0, index.appearances(dataset, item))
                uses = uses_of(item.visits / len(turns))
                for turn in turns:
                    key = latent_key(index.describe(dataset, item, turn, NO_CAPTION), encoder)
                    if key in there:
                        there[key].uses = _joined(there[key].uses, uses)
                    else:
                        there[key] = LatentItem(key, folder, uses, encoder, index, dataset, item, turn)
    return [item for some in found.values() for item in some.values()]


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
    found: dict[Path, dict[Key, TextItem]] = {}

    def add(text: str, pictures: tuple[SampleRef, ...], folder: Path, uses: Uses) -> None:
        there = found.setdefault(folder, {})
        key = text_key(text, encoder, pictures)
        if key in there:
            there[key].uses = _joined(there[key].uses, uses)
        else:
            there[key] = TextItem(key, folder, uses, encoder, text, pictures)

    lasting, drawn = places.text(), places.text(epoch)
    with rare_collections():
        for dataset, trained in _datasets(index):
            seen = reads_pictures and any(item.references for item in dataset.items)
            if seen and freshness(dataset.dataset) == "visit":
                continue  # the pictures are new at every visit, and so are the embeddings
            uses_of = _Uses(dataset, trained)
            for item in dataset.items:
                shown = [*_pictures(index, dataset, item, epoch)] if seen else _NOTHING_SHOWN
                for pictures, when in shown:
                    if part == "all" or (part == "epoch") == (when is not None):
                        for text, share in _texts(dataset, item):
                            uses = uses_of(item.visits / len(shown) * share)
                            add(text, pictures, lasting if when is None else drawn, uses)
        if not reads_pictures and part != "epoch":
            for text in prompts:
                add(text, (), lasting, ())
    return [item for some in found.values() for item in some.values()]


def visits_of(
    items: Iterable[LatentItem | TextItem], counts: Callable[[str], bool] = lambda dataset: True
) -> dict[Key, Visits]:
    """How often an epoch reads each entry for the datasets that count; entries that none of them reads are left out."""
    found: dict[Key, Visits] = {}
    for item in items:
        for dataset, visits in item.uses:
            if counts(dataset):
                found[item.key] = found[item.key] + visits if item.key in found else visits
    return found


@lru_cache(maxsize=256)
def _turns(variant: int, appearances: int) -> tuple[Turn, ...]:
    return tuple(Turn(variant, count) for count in range(appearances))


class _Uses:
    """The uses of one dataset's entries: one object for all that are visited equally often, which most are."""

    def __init__(self, dataset: DatasetIndex, trained: bool) -> None:
        self._dataset, self._trained = dataset.dataset, trained
        self._made: dict[float, Uses] = {}

    def __call__(self, per_epoch: float) -> Uses:
        if per_epoch not in self._made:
            visits = Visits(per_epoch if self._trained else 0.0, self._dataset.probability)
            self._made[per_epoch] = ((self._dataset.id, visits),)
        return self._made[per_epoch]


def _joined(one: Uses, other: Uses) -> Uses:
    """Two appearances, datasets or captions with the same entry."""
    found = dict(one)
    for dataset, visits in other:
        found[dataset] = found[dataset] + visits if dataset in found else visits
    return (*found.items(),)


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


_NOTHING_SHOWN: list[tuple[tuple[SampleRef, ...], int | None]] = [((), None)]


def _datasets(index: DataIndex) -> Iterator[tuple[DatasetIndex, bool]]:
    """Each with whether it is trained on."""
    yield from ((dataset, True) for dataset in index.datasets)
    yield from ((dataset, False) for dataset in index.held_out)


def _cached(index: DataIndex, epoch: int, part: Part) -> Iterator[tuple[DatasetIndex, bool, int | None]]:
    """Datasets whose latents are cached, and the epoch they are cached for, if only for one."""
    for dataset, trained in _datasets(index):
        kept = freshness(dataset.dataset)
        if kept == "visit" or part == ("lasting" if kept == "epoch" else "epoch"):
            continue
        yield dataset, trained, epoch if kept == "epoch" else None


def _pictures(
    index: DataIndex, dataset: DatasetIndex, item: Item, epoch: int
) -> Iterator[tuple[tuple[SampleRef, ...], int | None]]:
    anew = freshness(dataset.dataset) == "epoch"
    for turn in _turns(epoch if anew else 0, index.appearances(dataset, item)):
        ref = index.describe(dataset, item, turn, NO_CAPTION)
        # Without references nothing is drawn that the embedding could depend on.
        yield ref.conditioning, epoch if anew and ref.conditioning else None


def _texts(dataset: DatasetIndex, item: Item) -> Iterator[tuple[str, float]]:
    """Each text with the share of the item's visits that draws it."""
    options = dataset.dataset.captions
    for caption in item.captions:
        yield caption, (1 - options.dropout) / len(item.captions)
    if options.dropout > 0:
        yield options.dropped_caption, options.dropout


def _flips(ref: SampleRef) -> tuple[bool, bool]:
    return ref.augmentation.flip_x, ref.augmentation.flip_y


def _volume(bucket: Bucket) -> int:
    return bucket.audio_samples or bucket.width * bucket.height * bucket.frames


def _decoded(bucket: Bucket) -> int:
    """float32: three colours, or every channel of a sound."""
    return 4 * _volume(bucket) * (bucket.audio_channels if bucket.audio_samples else 3)
