"""How often an epoch reads each entry. What is read least is the first to stay on disk when memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gracetune.cache.encoder import EncoderId
from gracetune.cache.keys import Key, latent_key, text_key
from gracetune.data.index import NO_CAPTION, DataIndex, Turn, freshness
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.refs import SampleRef


@dataclass(frozen=True, order=True)
class Visits:
    """Sorts by how hot an entry is."""

    per_epoch: float
    probability: float = 1.0
    """Of its dataset: an epoch visits everything, the more probable sooner, and a run may end inside an epoch."""

    def __add__(self, other: Visits) -> Visits:
        return Visits(self.per_epoch + other.per_epoch, max(self.probability, other.probability))


def latent_visits(index: DataIndex, encoder: EncoderId, epoch: int = 0) -> dict[Key, Visits]:
    """Everything the latent cache holds for an epoch. Held-out samples are read by validation alone: 0 visits."""
    found: dict[Key, Visits] = {}
    for dataset, trained in _datasets(index):
        if freshness(dataset.dataset) == "visit":
            continue
        for item in dataset.items:
            shown = [*_appearances(index, dataset, item, epoch)]
            visits = Visits(item.visits / len(shown) if trained else 0.0, dataset.dataset.probability)
            for ref in shown:
                _add(found, latent_key(ref, encoder), visits)
    return found


def text_visits(
    index: DataIndex, encoder: EncoderId, *, reads_pictures: bool = False, epoch: int = 0
) -> dict[Key, Visits]:
    """Every caption an epoch can draw, and the empty one where captions are dropped."""
    found: dict[Key, Visits] = {}
    for dataset, trained in _datasets(index):
        if reads_pictures and freshness(dataset.dataset) == "visit" and _has_pictures(dataset):
            continue  # their pictures are new at every visit, and so are the embeddings
        for item in dataset.items:
            shown = [*_appearances(index, dataset, item, epoch)] if reads_pictures else [None]
            visits = item.visits / len(shown) if trained else 0.0
            for ref in shown:
                pictures = ref.conditioning if ref is not None else ()
                for text, share in _texts(dataset, item):
                    weight = Visits(visits * share, dataset.dataset.probability)
                    _add(found, text_key(text, encoder, pictures), weight)
    return found


def _datasets(index: DataIndex) -> Iterator[tuple[DatasetIndex, bool]]:
    yield from ((dataset, True) for dataset in index.datasets)
    yield from ((dataset, False) for dataset in index.held_out)


def _has_pictures(dataset: DatasetIndex) -> bool:
    return any(item.references for item in dataset.items)


def _appearances(index: DataIndex, dataset: DatasetIndex, item: Item, epoch: int) -> Iterator[SampleRef]:
    variant = epoch if freshness(dataset.dataset) == "epoch" else 0
    for count in range(index.appearances(dataset, item)):
        yield index.describe(dataset, item, Turn(variant, count), NO_CAPTION)


def _texts(dataset: DatasetIndex, item: Item) -> Iterator[tuple[str, float]]:
    """Each text with the share of the item's visits that draws it."""
    options = dataset.dataset.captions
    for caption in item.captions:
        yield caption, (1 - options.dropout) / len(item.captions)
    if options.dropout > 0:
        yield options.dropped_caption, options.dropout


def _add(found: dict[Key, Visits], key: Key, visits: Visits) -> None:
    found[key] = found[key] + visits if key in found else visits
