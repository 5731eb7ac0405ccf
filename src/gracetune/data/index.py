"""Everything a run can train on, and how a sample is described when its turn comes.

What varies between two visits of a sample, and when:

- Flips, and the clips of `video.clip: uniform`, are taken in turn, visit after visit; each is cached on its own.
- Whatever is random (the place of a crop or clip, `transforms`) is drawn from the seed, the file's content and a
  variant number. Where latents are cached the number is 0 for good, so that a cached latent stays right; with
  `cache_mode: refresh_each_epoch` it is the epoch; without a cache it is new for every visit.
- The caption's variant and its dropout are drawn for every global sample index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal

from gracetune.config.dataset_config import Dataset
from gracetune.data.backend import Backend
from gracetune.data.backends.errors import UnreadableFilesError, too_many
from gracetune.data.backends.listing import LeftOut
from gracetune.data.bucket_rules import Size
from gracetune.data.buckets import fit_picture
from gracetune.data.captions import caption_ref
from gracetune.data.clips import audio_clip, pieces, video_clip
from gracetune.data.fingerprint import Fingerprint, fingerprint
from gracetune.data.geometry import Geometry
from gracetune.data.items import DatasetIndex, Item, Reference, audio_rate, size_of
from gracetune.data.media.load import DecodeLimits, Sample, load
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.refs import Augmentation, Bucket, CaptionRef, Clip, Fit, SampleRef
from gracetune.data.sampler import MIXED_BY_SIZE, Drawn, Group, Mixing, Order, Source
from gracetune.seeded_random import below, draw

Freshness = Literal["once", "epoch", "visit"]
"""How long a random crop, clip or transform stays as it was drawn."""

Unreadable = Mapping[str, Mapping[str, str]]
"""Files that turned out to be damaged: dataset id -> path -> reason."""
DamagedFiles = dict[tuple[str, str], str]
"""The same, as they are found: dataset id and path -> reason."""

NO_CAPTION = CaptionRef("")
MOST_MADE = 1 << 15
"""References that are kept; about 1 KB each."""


@dataclass(frozen=True)
class Turn:
    """Which of its variants a sample shows."""

    variant: int
    """Draws what is random."""
    count: int
    """Which of its flips and clips, numbered through."""


@dataclass(frozen=True)
class DataIndex:
    """The datasets of a run, in the order of its config."""

    seed: int
    geometry: Geometry
    datasets: tuple[DatasetIndex, ...]
    """Those that are trained on."""
    held_out: tuple[DatasetIndex, ...]
    """Of type `eval`."""
    backends: Mapping[str, Backend]
    """By dataset id; the masks of a dataset under `masks_id`."""
    notes: tuple[str, ...] = ()
    mixing: Mixing = MIXED_BY_SIZE

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.datasets)

    def order(self, batch_size: int) -> Order:
        """The order of the samples of the trained datasets."""
        groups: list[Group] = []
        for position, index in enumerate(self.datasets):
            shapes: dict[tuple[object, ...], list[int]] = {}
            for number, item in enumerate(index.items):
                shapes.setdefault(item.shape, []).append(number)
            groups += [
                Group(position, index.items[members[0]].shape, tuple(members),
                      tuple(index.items[member].visits for member in members),
                      tuple(draw(0, index.items[member].path) for member in members))
                for members in shapes.values()
            ]  # fmt: skip
        groups.sort(key=lambda group: (group.source, group.shape))
        sources = [_source(index.dataset) for index in self.datasets]
        return Order(sources, groups, seed=self.seed, batch_size=batch_size, mixing=self.mixing)

    def ref(self, drawn: Drawn, number: int, epoch: int) -> SampleRef:
        """One sample of a drawn batch."""
        index = self.datasets[drawn.source]
        visit = drawn.visits[number]
        item = index.items[visit.sample]
        passes = epoch if drawn.passed is None else drawn.passed
        turn = self.turn(index, item, epoch, visit.round, passes)
        caption = caption_ref(
            item.captions, index.dataset.captions, self.seed, drawn.first_index + number,
            visit=passes * item.visits + visit.round,
        )  # fmt: skip
        if freshness(index.dataset) == "visit":
            return self.describe(index, item, turn, caption)
        known = (drawn.source, visit.sample, turn.variant, turn.count, caption.variant, caption.dropped)
        made = self._made.get(known)
        if made is None:
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            made = self._made[known] = self.describe(index, item, turn, caption)
        return made

    @cached_property
    def _made(self) -> dict[tuple[int, ...], SampleRef]:
        """References that come again as they are: in every epoch, and the same objects, so that caches know them."""
        return {}

    def turn(self, index: DatasetIndex, item: Item, epoch: int, turn: int, passes: int | None = None) -> Turn:
        """`passes`: how often the sample's dataset was gone through before, where that is not the epoch."""
        visit = (epoch if passes is None else passes) * item.visits + turn
        variant = {"once": 0, "epoch": epoch, "visit": visit}[freshness(index.dataset)]
        ways = self.appearances(index, item)
        # Every file begins with another flip, so that an epoch has all of them.
        first = below(ways, self.seed, "turn", item.file.digest)
        return Turn(variant, (visit + first) % ways)

    def appearances(self, index: DatasetIndex, item: Item) -> int:
        """In how many ways a sample is shown in turn: flips x clips."""
        return len(flips(index.dataset)) * self._pieces(index, item)

    def cacheable(self, epoch: int = 0) -> Iterator[SampleRef]:
        """Everything the latent cache has to hold for an epoch, each once; captions are left empty."""
        for index in (*self.datasets, *self.held_out):
            kept = freshness(index.dataset)
            if kept == "visit":
                continue
            variant = epoch if kept == "epoch" else 0
            for item in index.items:
                for count in range(self.appearances(index, item)):
                    yield self.describe(index, item, Turn(variant, count), NO_CAPTION)

    def captions(self) -> Iterator[str]:
        """Every text a sample can be trained with, each once; that of a dropped caption where captions are dropped."""
        seen: dict[str, None] = {}
        for index in (*self.datasets, *self.held_out):
            if index.dataset.captions.dropout > 0:
                seen[index.dataset.captions.dropped_caption] = None
            for item in index.items:
                seen.update(dict.fromkeys(item.captions))
        return iter(seen)

    def describe(self, index: DatasetIndex, item: Item, turn: Turn, caption: CaptionRef) -> SampleRef:
        dataset, file = index.dataset, item.file
        ways = flips(dataset)
        flip_x, flip_y = ways[turn.count % len(ways)]
        augmentation = Augmentation(
            flip_x,
            flip_y,
            self.seed if index.transforms else None,
            turn.variant if index.transforms else 0,
            index.transforms,
        )
        fit = None
        if not isinstance(file.facts, AudioFacts):
            fit = self._fit(item.size, item.bucket, dataset, file.digest, turn)
        references: tuple[SampleRef, ...] = ()
        if item.references:
            shared = replace(augmentation, of=file.digest)
            references = tuple(self._reference(one, fit, shared, turn) for one in item.references)
        return SampleRef(
            dataset=dataset.id,
            path=file.path,
            digest=file.digest,
            bucket=item.bucket,
            fit=fit,
            caption=caption,
            clip=self._clip(index, item, turn),
            augmentation=augmentation,
            conditioning=references,
            mask=item.mask,
            normalises_mask=item.normalises_mask,
            loss_weight=dataset.loss_weight,
        )

    def _fit(self, size: Size, bucket: Bucket, dataset: Dataset, digest: str, turn: Turn) -> Fit:
        return fit_picture(
            size, bucket, dataset, self.geometry, seed=self.seed, digest=digest, variant=turn.variant
        )  # fmt: skip

    def _pieces(self, index: DatasetIndex, item: Item) -> int:
        facts = item.file.facts
        return pieces(facts, index.dataset.video, item.bucket.frames) if isinstance(facts, VideoFacts) else 1

    def _clip(self, index: DatasetIndex, item: Item, turn: Turn) -> Clip | None:
        dataset, facts, digest = index.dataset, item.file.facts, item.file.digest
        if isinstance(facts, VideoFacts):
            piece = turn.count // len(flips(dataset)) % self._pieces(index, item)
            return video_clip(
                facts, dataset.video, item.bucket.frames, piece=piece, seed=self.seed, digest=digest,
                variant=turn.variant,
            )  # fmt: skip
        if isinstance(facts, AudioFacts):
            rate = audio_rate(dataset, self.geometry, facts)
            return audio_clip(
                facts, dataset.audio, item.bucket.audio_samples, rate, seed=self.seed, digest=digest,
                variant=turn.variant,
            )  # fmt: skip
        return None

    def _reference(self, one: Reference, target: Fit | None, augmentation: Augmentation, turn: Turn) -> SampleRef:
        size = size_of(one.file)
        if one.strict and target is not None:
            fit = Fit(size, target.resized, target.left, target.top)
        else:
            fit = self._fit(size, one.bucket, one.dataset, one.file.digest, turn)
        return SampleRef(
            one.dataset.id, one.file.path, one.file.digest, one.bucket, fit, NO_CAPTION, augmentation=augmentation
        )

    def backend_of(self, dataset_id: str) -> Backend:
        return self.backends[dataset_id]

    def load(self, ref: SampleRef, limits: DecodeLimits | None = None) -> Sample:
        """Decode one sample."""
        return load(ref, self.backend_of, limits)

    def without(self, unreadable: Unreadable) -> DataIndex:
        """The same index without files that turned out to be damaged when they were decoded. It looks at every item:
        where files are found one after the other, `Exclusions` collects them.

        Raises UnreadableFilesError where these and the ones known before are more than `corrupt_threshold` allows, or
        leave nothing of a dataset. In a run this is the loader's to do: `Loader.exclude`.
        """
        return replace(
            self,
            datasets=tuple(_without(index, unreadable) for index in self.datasets),
            held_out=tuple(_without(index, unreadable) for index in self.held_out),
        )


def by_dataset(damaged: DamagedFiles) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for (dataset, path), reason in sorted(damaged.items()):
        found.setdefault(dataset, {})[path] = reason
    return found


def left_out_lines(damaged: DamagedFiles) -> list[str]:
    return [
        f"left out, unreadable: {path} of {dataset}: {reason}" for (dataset, path), reason in sorted(damaged.items())
    ]


class Exclusions:
    """Damaged files of an index, found one after the other. The index without them is made once, at the end."""

    def __init__(self, index: DataIndex) -> None:
        self._index = index
        self._found: dict[str, dict[str, str]] = {}
        self._gone: dict[int, set[str]] = {}
        """The items that go with them, by the position of their dataset among `_datasets`."""

    def add(self, dataset_id: str, path: str, reason: str) -> None:
        """Raises as `DataIndex.without` does, with the first file that is one too many."""
        self._found.setdefault(dataset_id, {})[path] = reason
        for number, item in self._owners.get((dataset_id, path), ()):
            index = self._datasets[number]
            gone = self._gone.setdefault(number, set())
            gone.add(item)
            known, total = len(index.unreadable), len(index.items) + len(index.unreadable) + len(index.dropped)
            if len(gone) == len(index.items) or too_many(known + len(gone), total, index.dataset.corrupt_threshold):
                self.apply()

    def apply(self) -> DataIndex:
        return self._index.without(self._found) if self._found else self._index

    @property
    def _datasets(self) -> tuple[DatasetIndex, ...]:
        return (*self._index.datasets, *self._index.held_out)

    @cached_property
    def _owners(self) -> dict[tuple[str, str], list[tuple[int, str]]]:
        """Which items go with a file: dataset and path -> position of a dataset, and the item's path."""
        found: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for number, index in enumerate(self._datasets):
            for item in index.items:
                for file in ((index.id, item.path), *_parts(item)):
                    found.setdefault(file, []).append((number, item.path))
        return found


def _parts(item: Item) -> list[tuple[str, str]]:
    """The files an item needs besides its own: dataset and path."""
    if not item.references and item.mask is None:
        return []
    parts = [(one.dataset.id, one.file.path) for one in item.references]
    return parts if item.mask is None else [*parts, (item.mask.dataset, item.mask.path)]


def _without(index: DatasetIndex, unreadable: Unreadable) -> DatasetIndex:
    """A reference or mask that cannot be read takes its target with it."""
    own = unreadable.get(index.id, {})

    def damaged(item: Item) -> str | None:
        if item.path in own:
            return own[item.path]
        for owner, path in _parts(item):
            if path in unreadable.get(owner, {}):
                return f"its {path} of {owner}: {unreadable[owner][path]}"
        return None

    found = tuple(LeftOut(item.path, reason) for item in index.items if (reason := damaged(item)) is not None)
    if not found:
        return index
    gone = {one.path for one in found}
    kept = tuple(item for item in index.items if item.path not in gone)
    changed = replace(index, items=kept, unreadable=(*index.unreadable, *found))
    total = len(kept) + len(changed.unreadable) + len(index.dropped)
    check_unreadable(changed.dataset, changed.unreadable, total)
    if not kept:
        raise UnreadableFilesError(index.id, changed.unreadable, total=total, threshold=index.dataset.corrupt_threshold)
    return changed


def check_unreadable(dataset: Dataset, unreadable: tuple[LeftOut, ...], total: int) -> None:
    if too_many(len(unreadable), total, dataset.corrupt_threshold):
        raise UnreadableFilesError(dataset.id, unreadable, total=total, threshold=dataset.corrupt_threshold)


def freshness(dataset: Dataset) -> Freshness:
    """How long what is random about a dataset's samples stays the same: as long as their latents are cached."""
    if dataset.encodes_each_visit:
        return "visit"
    return "epoch" if dataset.augmentation.cache_mode == "refresh_each_epoch" else "once"


def flips(dataset: Dataset) -> tuple[tuple[bool, bool], ...]:
    """The ways a sample is turned, in the order they are taken: x and y."""
    augmentation = dataset.augmentation
    turns = dataset.dataset_type != "audio"
    return _ways(turns and augmentation.flip_x, turns and augmentation.flip_y)


@cache
def _ways(flip_x: bool, flip_y: bool) -> tuple[tuple[bool, bool], ...]:
    ways = {True: (False, True), False: (False,)}
    return tuple(product(ways[flip_x], ways[flip_y]))


def masks_id(dataset_id: str) -> str:
    """Under which the folder of a dataset's masks is found among the backends."""
    return f"{dataset_id}:masks"


def _source(dataset: Dataset) -> Source:
    return Source(
        dataset.id,
        dataset.probability,
        dataset.batch_size,
        dataset.start_epoch,
        dataset.end_epoch,
        dataset.start_step,
        dataset.end_step,
        dataset.even_steps,
        dataset.turn,
    )
