"""The data index: all items of a run's datasets, and the description of a sample at each of its visits.

Visits of the same sample differ as follows:

- Flips, and the clips of `video.clip: uniform`, rotate from visit to visit. Each combination is cached separately.
- Random choices (the position of a crop or clip, `transforms`) are functions of the seed, the file's content and a
  variant number. With cached latents the number is always 0, so that a cached latent stays valid. With
  `cache_mode: refresh_each_epoch` it is the epoch. Without a cache it changes at every visit.
- The caption variant and caption dropout are functions of the seed and the global sample index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal

from gracetune.config.dataset_config import Dataset
from gracetune.data.backend import Backend, LeftOut
from gracetune.data.backends.errors import UnreadableFilesError, too_many
from gracetune.data.bucket_rules import Size
from gracetune.data.buckets import fit_image
from gracetune.data.captions import caption_ref
from gracetune.data.clips import audio_clip, clip_count, video_clip
from gracetune.data.fingerprint import Fingerprint, fingerprint
from gracetune.data.geometry import Geometry
from gracetune.data.items import DatasetIndex, Item, Reference, audio_rate, size_of
from gracetune.data.media.load import DecodeLimits, Sample, load
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.refs import AppliedAugmentation, Bucket, CaptionRef, Clip, Fit, SampleRef
from gracetune.data.sampler import MIXED_BY_SIZE, BatchMixing, GlobalBatch, Order, OrderSource, SampleGroup
from gracetune.seeded_random import below, random_bits

Freshness = Literal["once", "epoch", "visit"]
"""How long a random crop, clip or transform stays the same: for the whole run, for an epoch, or for one visit."""

Unreadable = Mapping[str, Mapping[str, str]]
"""Files found to be damaged: dataset id -> path -> reason."""
DamagedFiles = dict[tuple[str, str], str]
"""The same while they are being collected: (dataset id, path) -> reason."""

NO_CAPTION = CaptionRef("")
MOST_KEPT_REFS = 1 << 15
"""Number of sample references kept for reuse, of about 1 KB each."""


@dataclass(frozen=True)
class Appearance:
    """How a sample looks at one visit: its random choices, and its combination of flip and clip."""

    variant: int
    """The variant number of the random choices."""
    combination: int
    """Below `DataIndex.combinations`."""


@dataclass(frozen=True)
class DataIndex:
    """The datasets of a run, in the order of its config."""

    seed: int
    geometry: Geometry
    datasets: tuple[DatasetIndex, ...]
    """The datasets that are trained on."""
    held_out: tuple[DatasetIndex, ...]
    """The data of the held-out loss: datasets of type `eval`, and the `held_out` part of trained datasets."""
    backends: Mapping[str, Backend]
    """By dataset id. The mask folder of a dataset is listed under `masks_id`."""
    notes: tuple[str, ...] = ()
    mixing: BatchMixing = MIXED_BY_SIZE

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.datasets)

    def order(self, batch_size: int) -> Order:
        """The order in which the trained datasets' samples are visited."""
        groups: list[SampleGroup] = []
        for position, index in enumerate(self.datasets):
            shapes: dict[tuple[object, ...], list[int]] = {}  # shape -> positions of its items
            for number, item in enumerate(index.items):
                shapes.setdefault(item.shape, []).append(number)
            groups += [
                SampleGroup(position, index.items[members[0]].shape, tuple(members),
                      tuple(index.items[member].visits for member in members),
                      tuple(random_bits(0, index.items[member].path) for member in members))
                for members in shapes.values()
            ]  # fmt: skip
        groups.sort(key=lambda group: (group.source, group.shape))
        sources = [_source(index.dataset) for index in self.datasets]
        return Order(sources, groups, seed=self.seed, batch_size=batch_size, mixing=self.mixing)

    def ref(self, batch: GlobalBatch, number: int, epoch: int) -> SampleRef:
        """Describe one sample of a batch; `number` is its position in `batch.visits`."""
        index = self.datasets[batch.source]
        visit = batch.visits[number]
        item = index.items[visit.sample]
        passes = epoch if batch.passed is None else batch.passed
        appearance = self.appearance(index, item, epoch, visit.round, passes)
        caption = caption_ref(
            item.captions, index.dataset.captions, self.seed, batch.first_index + number,
            visit=passes * item.visits + visit.round,
        )  # fmt: skip
        if freshness(index.dataset) == "visit":
            return self.describe(index, item, appearance, caption)
        key = (batch.source, visit.sample, appearance.variant, appearance.combination, caption.variant, caption.dropped)
        ref = self._refs.get(key)
        if ref is None:
            if len(self._refs) >= MOST_KEPT_REFS:
                self._refs.clear()
            ref = self._refs[key] = self.describe(index, item, appearance, caption)
        return ref

    @cached_property
    def _refs(self) -> dict[tuple[int, ...], SampleRef]:
        """References that recur in every epoch. Returning the same objects lets caches look them up by identity."""
        return {}

    def appearance(
        self, index: DatasetIndex, item: Item, epoch: int, round: int, passes: int | None = None
    ) -> Appearance:
        """How an item looks at visit number `round` of an epoch. `passes` is the number of completed passes over
        the dataset, if that differs from the epoch."""
        visit = (epoch if passes is None else passes) * item.visits + round
        variant = {"once": 0, "epoch": epoch, "visit": visit}[freshness(index.dataset)]
        count = self.combinations(index, item)
        # Files start at different flips, so that every epoch contains all of them.
        first = below(count, self.seed, "turn", item.file.digest)
        return Appearance(variant, (visit + first) % count)

    def combinations(self, index: DatasetIndex, item: Item) -> int:
        """How many combinations of flip and clip a sample rotates through."""
        return len(flips(index.dataset)) * self._clip_count(index, item)

    def cacheable(self, epoch: int = 0) -> Iterator[SampleRef]:
        """Every sample the latent cache needs for an epoch, each once, without captions."""
        for index in (*self.datasets, *self.held_out):
            lifetime = freshness(index.dataset)
            if lifetime == "visit":
                continue
            variant = epoch if lifetime == "epoch" else 0
            for item in index.items:
                for combination in range(self.combinations(index, item)):
                    yield self.describe(index, item, Appearance(variant, combination), NO_CAPTION)

    def captions(self) -> Iterator[str]:
        """Every text a sample can be trained with, each once, including the one that replaces a dropped caption."""
        seen: dict[str, None] = {}
        for index in (*self.datasets, *self.held_out):
            if index.dataset.captions.dropout > 0:
                seen[index.dataset.captions.dropped_caption] = None
            for item in index.items:
                seen.update(dict.fromkeys(item.captions))
        return iter(seen)

    def describe(self, index: DatasetIndex, item: Item, appearance: Appearance, caption: CaptionRef) -> SampleRef:
        """The full description of a sample at one visit."""
        dataset, file = index.dataset, item.file
        all_flips = flips(dataset)
        flip_x, flip_y = all_flips[appearance.combination % len(all_flips)]
        augmentation = AppliedAugmentation(
            flip_x,
            flip_y,
            seed=self.seed if index.transforms else None,
            epoch=appearance.variant if index.transforms else 0,
            transforms=index.transforms,
        )
        fit = None
        if not isinstance(file.facts, AudioFacts):
            fit = self._fit(item.size, item.bucket, dataset, file.digest, appearance)
        references: tuple[SampleRef, ...] = ()
        if item.references:
            shared = replace(augmentation, of=file.digest)  # references are flipped and transformed like their target
            references = tuple(self._reference(reference, fit, shared, appearance) for reference in item.references)
        return SampleRef(
            dataset=dataset.id,
            path=file.path,
            digest=file.digest,
            bucket=item.bucket,
            fit=fit,
            caption=caption,
            clip=self._clip(index, item, appearance),
            augmentation=augmentation,
            conditioning=references,
            mask=item.mask,
            normalises_mask=item.normalises_mask,
            loss_weight=dataset.loss_weight,
        )

    def _fit(self, size: Size, bucket: Bucket, dataset: Dataset, digest: str, appearance: Appearance) -> Fit:
        return fit_image(
            size, bucket, dataset, self.geometry, seed=self.seed, digest=digest, variant=appearance.variant
        )  # fmt: skip

    def _clip_count(self, index: DatasetIndex, item: Item) -> int:
        facts = item.file.facts
        return clip_count(facts, index.dataset.video, item.bucket.frames) if isinstance(facts, VideoFacts) else 1

    def _clip(self, index: DatasetIndex, item: Item, appearance: Appearance) -> Clip | None:
        dataset, facts, digest = index.dataset, item.file.facts, item.file.digest
        if isinstance(facts, VideoFacts):
            clip_number = appearance.combination // len(flips(dataset)) % self._clip_count(index, item)
            return video_clip(
                facts, dataset.video, item.bucket.frames, clip_number=clip_number, seed=self.seed, digest=digest,
                variant=appearance.variant,
            )  # fmt: skip
        if isinstance(facts, AudioFacts):
            rate = audio_rate(dataset, self.geometry, facts)
            return audio_clip(
                facts, dataset.audio, item.bucket.audio_samples, rate, seed=self.seed, digest=digest,
                variant=appearance.variant,
            )  # fmt: skip
        return None

    def _reference(
        self, reference: Reference, target: Fit | None, augmentation: AppliedAugmentation, appearance: Appearance
    ) -> SampleRef:
        dataset, file, bucket = reference.dataset, reference.file, reference.bucket
        size = size_of(file)
        if reference.strict and target is not None:
            fit = Fit(size, target.resized, target.left, target.top)
        else:
            fit = self._fit(size, bucket, dataset, file.digest, appearance)
        return SampleRef(
            dataset.id, file.path, file.digest, bucket, fit, NO_CAPTION, augmentation=augmentation,
            canny=reference.canny,
        )  # fmt: skip

    def backend_of(self, dataset_id: str) -> Backend:
        return self.backends[dataset_id]

    def load(self, ref: SampleRef, limits: DecodeLimits | None = None) -> Sample:
        """Decode one sample."""
        return load(ref, self.backend_of, limits)

    def without(self, unreadable: Unreadable) -> DataIndex:
        """The same index without files that were found to be damaged during decoding.

        Raises UnreadableFilesError if together with those already known they exceed `corrupt_threshold`, or if a
        dataset has no file left. During a run, call `Loader.exclude` instead. This method visits every item; to add
        damaged files one by one, collect them with `Exclusions`.
        """
        return replace(
            self,
            datasets=tuple(_without(index, unreadable) for index in self.datasets),
            held_out=tuple(_without(index, unreadable) for index in self.held_out),
        )


def by_dataset(damaged: DamagedFiles) -> dict[str, dict[str, str]]:
    """Damaged files grouped as `Unreadable`: dataset id -> path -> reason."""
    found: dict[str, dict[str, str]] = {}
    for (dataset, path), reason in sorted(damaged.items()):
        found.setdefault(dataset, {})[path] = reason
    return found


def left_out_lines(damaged: DamagedFiles) -> list[str]:
    """One message for each damaged file."""
    return [
        f"left out, unreadable: {path} of {dataset}: {reason}" for (dataset, path), reason in sorted(damaged.items())
    ]


class Exclusions:
    """Collects damaged files of an index one by one. `apply` builds the index without them once, at the end."""

    def __init__(self, index: DataIndex) -> None:
        self._index = index
        self._found: dict[str, dict[str, str]] = {}
        self._excluded: dict[int, set[str]] = {}
        """Paths of the items excluded because one of their files is damaged, by the position of their dataset among
        `_datasets`."""

    def add(self, dataset_id: str, path: str, reason: str) -> None:
        """Add a damaged file. Raises as `DataIndex.without` does, at the first file that exceeds the threshold."""
        self._found.setdefault(dataset_id, {})[path] = reason
        for number, item in self._owners.get((dataset_id, path), ()):
            index = self._datasets[number]
            excluded = self._excluded.setdefault(number, set())
            excluded.add(item)
            known, total = len(index.unreadable), len(index.items) + len(index.unreadable) + len(index.dropped)
            over = too_many(known + len(excluded), total, index.dataset.corrupt_threshold)
            if over or len(excluded) == len(index.items):
                self.apply()  # raises UnreadableFilesError

    def apply(self) -> DataIndex:
        return self._index.without(self._found) if self._found else self._index

    @property
    def _datasets(self) -> tuple[DatasetIndex, ...]:
        return (*self._index.datasets, *self._index.held_out)

    @cached_property
    def _owners(self) -> dict[tuple[str, str], list[tuple[int, str]]]:
        """The items that use a file: (dataset id, path) -> position of the item's dataset, and the item's path."""
        found: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for number, index in enumerate(self._datasets):
            for item in index.items:
                for file in ((index.id, item.path), *_parts(item)):
                    found.setdefault(file, []).append((number, item.path))
        return found


def _parts(item: Item) -> list[tuple[str, str]]:
    """The files an item needs besides its own, as (dataset id, path)."""
    if not item.references and item.mask is None:
        return []
    parts = [(reference.dataset.id, reference.file.path) for reference in item.references]
    return parts if item.mask is None else [*parts, (item.mask.dataset, item.mask.path)]


def _without(index: DatasetIndex, unreadable: Unreadable) -> DatasetIndex:
    """The dataset without damaged items. A damaged reference or mask also excludes its target."""
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
    excluded = {file.path for file in found}
    kept = tuple(item for item in index.items if item.path not in excluded)
    changed = replace(index, items=kept, unreadable=(*index.unreadable, *found))
    total = len(kept) + len(changed.unreadable) + len(index.dropped)
    check_unreadable(changed.dataset, changed.unreadable, total)
    if not kept:
        raise UnreadableFilesError(index.id, changed.unreadable, total=total, threshold=index.dataset.corrupt_threshold)
    return changed


def check_unreadable(dataset: Dataset, unreadable: tuple[LeftOut, ...], total: int) -> None:
    """Raise UnreadableFilesError if more files are unreadable than `corrupt_threshold` allows."""
    if too_many(len(unreadable), total, dataset.corrupt_threshold):
        raise UnreadableFilesError(dataset.id, unreadable, total=total, threshold=dataset.corrupt_threshold)


def freshness(dataset: Dataset) -> Freshness:
    """How long the random choices of a dataset's samples stay the same: as long as their latents are cached."""
    if dataset.encodes_each_visit:
        return "visit"
    return "epoch" if dataset.augmentation.cache_mode == "refresh_each_epoch" else "once"


def flips(dataset: Dataset) -> tuple[tuple[bool, bool], ...]:
    """The combinations of (flip_x, flip_y) that a sample rotates through, in order."""
    augmentation = dataset.augmentation
    can_flip = dataset.dataset_type != "audio"
    return _flips(can_flip and augmentation.flip_x, can_flip and augmentation.flip_y)


@cache
def _flips(flip_x: bool, flip_y: bool) -> tuple[tuple[bool, bool], ...]:
    choices = {True: (False, True), False: (False,)}
    return tuple(product(choices[flip_x], choices[flip_y]))


def masks_id(dataset_id: str) -> str:
    """The key of a dataset's mask folder in `DataIndex.backends`."""
    return f"{dataset_id}:masks"


def _source(dataset: Dataset) -> OrderSource:
    return OrderSource(
        dataset.id,
        probability=dataset.probability,
        batch_size=dataset.batch_size,
        start_epoch=dataset.start_epoch,
        end_epoch=dataset.end_epoch,
        start_step=dataset.start_step,
        end_step=dataset.end_step,
        even_steps=dataset.even_steps,
        turn=dataset.turn,
    )
