"""Pairing: attaches edit sources, references and masks to items by file name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gracetune.config.dataset_config import Dataset, Mask
from gracetune.data.backends.errors import SHOWN, leave_out, too_many
from gracetune.data.bucket_rules import Size
from gracetune.data.buckets import UnfitFile
from gracetune.data.errors import DataError
from gracetune.data.geometry import Geometry
from gracetune.data.items import Dropped, Item, Reference, bucket_of, same_stem, size_of, stem_of
from gracetune.data.media.probe import ImageFacts
from gracetune.data.media_files import MediaFile
from gracetune.data.refs import Bucket, Canny, MaskRef
from gracetune.data.text_format import counted, some
from gracetune.errors import Problem

SAME_SHAPE = 0.02
"""Relative tolerance between the aspect ratios of two images that belong together, for rounded sizes."""


class MismatchedPairsError(DataError):
    """More targets lack a reference than `corrupt_threshold` allows."""


@dataclass(frozen=True)
class Paired:
    """Items with their partners attached, the items that lack one, and notes for the user."""

    items: list[Item]
    dropped: list[Dropped]
    notes: list[str]


class ByStem:
    """Looks up files by the path of their partner: the same folder and stem, or the same stem if it is unique."""

    def __init__(self, owner: str, files: Iterable[MediaFile]) -> None:
        self._files = list(files)
        doubles = same_stem(file.path for file in self._files)
        if doubles:
            first = next(iter(doubles.values()))
            raise DataError(
                str(
                    Problem(
                        f"{owner}: files with the same name",
                        f"{', '.join(first)}" + (f" and {len(doubles) - 1} more groups" if len(doubles) > 1 else ""),
                        "one file for each target",
                        "remove or rename all but one of them",
                    )
                )
            )
        self._whole = {stem_of(file.path): file for file in self._files}
        names: dict[str, list[MediaFile]] = {}
        for file in self._files:
            names.setdefault(_bare_name(file.path), []).append(file)
        self._bare = {name: found[0] for name, found in names.items() if len(found) == 1}

    def find(self, path: str) -> MediaFile | None:
        return self._whole.get(stem_of(path)) or self._bare.get(_bare_name(path))

    def unused(self, used: set[str]) -> list[str]:
        return [file.path for file in self._files if file.path not in used]


def _bare_name(path: str) -> str:
    return stem_of(path).rpartition("/")[2]


def with_references(
    items: Sequence[Item],
    dataset: Dataset,
    sources: Sequence[tuple[Dataset, Sequence[MediaFile]]],
    geometry: Geometry,
    seed: int,
) -> Paired:
    """Attach one reference from each source to every item, in the order of the sources.

    Items that lack a reference are dropped. Raises MismatchedPairsError if there are too many.
    """
    lookups = [(source, ByStem(f"dataset {source.id}", files)) for source, files in sources]
    paired: list[Item] = []
    dropped: list[Dropped] = []
    used: dict[str, set[str]] = {source.id: set() for source, _ in sources}
    for item in items:
        found = [_reference(item, source, lookup, geometry, seed) for source, lookup in lookups]
        references = [result for result in found if isinstance(result, Reference)]
        missing = next((result for result in found if isinstance(result, Dropped)), None)
        for reference in references:
            used[reference.dataset.id].add(reference.file.path)
        if missing is None:
            paired.append(replace(item, references=tuple(references)))
        else:
            dropped.append(missing)
    _stop_if_too_many(dropped, len(items), dataset)
    notes = [
        f"{counted(len(unused), 'image')} of {source.id} without a target: {some(unused)}"
        for source, lookup in lookups
        if (unused := lookup.unused(used[source.id]))
    ]
    return Paired(paired, dropped, notes)


def _reference(item: Item, source: Dataset, lookup: ByStem, geometry: Geometry, seed: int) -> Reference | Dropped:
    """The item's reference in `source`, or the reason for dropping the item."""
    file = lookup.find(item.path)
    if file is None:
        return Dropped(item.path, f"no reference in {source.id}", f"expected {stem_of(item.path)}.* in {source.path}")
    strict = source.conditioning_type == "reference_strict"
    if strict:
        if not same_shape(size_of(file), item.size):
            return Dropped(item.path, f"its reference in {source.id} has a different shape", _shapes(file, item))
        return Reference(source, file, Bucket(item.bucket.width, item.bucket.height), strict=True)
    bucket = bucket_of(file, source, geometry, seed)
    if isinstance(bucket, UnfitFile):
        return Dropped(item.path, f"its reference in {source.id} is {bucket.reason}", f"{file.path}: {bucket.detail}")
    return Reference(source, file, bucket, strict=False)


def with_canny_references(items: Sequence[Item], dataset: Dataset, thresholds: Canny) -> Paired:
    """Each item with its own edges as its last reference."""
    made = [
        replace(
            item,
            references=(*item.references, Reference(dataset, item.file, item.bucket, strict=True, canny=thresholds)),
        )
        for item in items
    ]
    return Paired(made, [], [])


def _shapes(file: MediaFile, item: Item) -> str:
    (width, height), (wide, high) = size_of(file), item.size
    return f"{width}x{height} for {wide}x{high}; crop one like the other, or write conditioning_type: reference_loose"


def same_shape(one: Size, other: Size) -> bool:
    """Whether two sizes have the same aspect ratio, up to rounding."""
    return abs(one[0] * other[1] / (one[1] * other[0]) - 1) <= SAME_SHAPE


def _stop_if_too_many(dropped: Sequence[Dropped], total: int, dataset: Dataset) -> None:
    if not too_many(len(dropped), total, dataset.corrupt_threshold):
        return
    lines = "".join(f"\n    {one.path}: {one.reason} ({one.detail})" for one in dropped[:SHOWN])
    more = f"\n    ... and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else ""
    problem = Problem(
        f"dataset {dataset.id}: edit pairs that do not match",
        f"{len(dropped)} of {total} targets",
        f"at most {dataset.corrupt_threshold:.3g} of them (corrupt_threshold)",
        f"give each target and its reference the same file name{leave_out(dataset.id, len(dropped), total)}",
    )
    raise MismatchedPairsError(f"{problem}{lines}{more}")


def with_masks(items: Sequence[Item], mask: Mask, dataset_id: str, files: Sequence[MediaFile]) -> Paired:
    """Attach masks to items by file name. An item without a mask is trained on its whole area, with a note."""
    lookup = ByStem(f"masks of {dataset_id}", files)
    masked: list[Item] = []
    dropped: list[Dropped] = []
    without: list[str] = []
    for item in items:
        file = lookup.find(item.path)
        if file is None:
            without.append(item.path)
            masked.append(item)
        elif not same_shape(size_of(file), item.size):
            (width, height), (wide, high) = size_of(file), item.size
            dropped.append(Dropped(item.path, "its mask has a different shape", f"{width}x{height} for {wide}x{high}"))
        else:
            ref = MaskRef(dataset_id, file.path, file.digest, min_weight=mask.min_weight, invert=mask.invert)
            masked.append(replace(item, mask=ref, normalises_mask=mask.normalise))
    note = f"{counted(len(without), 'sample')} without a mask, trained on the whole area: {some(without)}"
    return Paired(masked, dropped, [note] if without else [])


def with_alpha_masks(items: Sequence[Item], mask: Mask, dataset_id: str) -> Paired:
    """Use the alpha channel of images as their masks."""
    masked: list[Item] = []
    opaque: list[str] = []
    for item in items:
        if isinstance(item.file.facts, ImageFacts) and item.file.facts.has_alpha:
            ref = MaskRef(
                dataset_id, item.path, item.file.digest, from_alpha=True, min_weight=mask.min_weight, invert=mask.invert
            )
            masked.append(replace(item, mask=ref, normalises_mask=mask.normalise))
        else:
            opaque.append(item.path)
            masked.append(item)
    note = f"{counted(len(opaque), 'sample')} without an alpha channel, trained on the whole area: {some(opaque)}"
    return Paired(masked, [], [note] if opaque else [])


def conditioning_datasets(dataset: Dataset, datasets: Mapping[str, Dataset]) -> list[Dataset]:
    """The conditioning datasets of a dataset: those it names, then those that name it."""
    named = [datasets[name] for name in dataset.conditioning]
    naming = [other for other in datasets.values() if other.source_dataset_id == dataset.id and other not in named]
    return [*named, *naming]
