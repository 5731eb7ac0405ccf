"""Items: the files of a dataset that are trained on, and the files that are not, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gracetune.config.dataset_config import Dataset
from gracetune.data.backend import LeftOut
from gracetune.data.backends.paths import split_suffix
from gracetune.data.bucket_rules import Size
from gracetune.data.buckets import UnfitFile, audio_length, clip_frames, fit_image, image_bucket
from gracetune.data.captions import CaptionOrigin, KohyaFolder, kohya_folder
from gracetune.data.clips import available_frames
from gracetune.data.geometry import Geometry
from gracetune.data.media.image import MAX_PIXELS
from gracetune.data.media.probe import AudioFacts, ImageFacts, VideoFacts
from gracetune.data.media_files import MediaFile
from gracetune.data.refs import Bucket, Canny, MaskRef, Transform
from gracetune.seeded_random import random_bits

MOST_FOLDER_VISITS = 500
"""A larger number at the start of a folder name is a year or a date, not a repeat count for kohya's scripts."""


@dataclass(frozen=True)
class Reference:
    """An edit source or reference image of an item."""

    dataset: Dataset
    """The dataset of the reference, not of the item."""
    file: MediaFile
    bucket: Bucket
    strict: bool
    """True: scaled and cropped exactly like its target. False: it keeps its own shape."""
    canny: Canny | None = None
    """If set, the edges of the image replace it."""


@dataclass(frozen=True)
class Item:
    """A file that is trained on."""

    file: MediaFile
    bucket: Bucket
    visits: int = 1
    """Visits per epoch."""
    captions: tuple[str, ...] = ("",)
    """Every caption variant it can be trained with."""
    caption_origin: CaptionOrigin = "missing"
    references: tuple[Reference, ...] = ()
    mask: MaskRef | None = None
    normalises_mask: bool = False
    """Divide the mask's weights by their mean over the batch."""

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def shape(self) -> tuple[Bucket, ...]:
        """The buckets of the item and of its references. All samples of a batch have the same shape."""
        return (self.bucket, *(reference.bucket for reference in self.references))

    @property
    def size(self) -> Size:
        """Width and height of an image or video as displayed."""
        return size_of(self.file)


@dataclass(frozen=True)
class Dropped:
    """A readable file that is not trained on."""

    path: str
    reason: str
    """The same text for all files with this reason, so that they can be counted."""
    detail: str
    """About this file."""


@dataclass(frozen=True)
class DatasetIndex:
    """One dataset with its scanned files."""

    position: int
    """Its position in the config's list of datasets."""
    dataset: Dataset
    items: tuple[Item, ...]
    transforms: tuple[Transform, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    unreadable: tuple[LeftOut, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    """Files that the storage does not give access to."""
    others: Mapping[str, int] | None = None
    """`Scan.others`: the number of files of other kinds, by extension with its dot."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""

    @property
    def id(self) -> str:
        return self.dataset.id


def size_of(file: MediaFile) -> Size:
    facts = file.facts
    if isinstance(facts, AudioFacts):
        raise TypeError(f"{file.path}: audio has no width and height")
    return facts.width, facts.height


def bucket_of(file: MediaFile, dataset: Dataset, geometry: Geometry, seed: int) -> Bucket | UnfitFile:
    """The shape a file is trained in. It depends only on the content and the settings, and caches rely on that."""
    facts = file.facts
    if isinstance(facts, AudioFacts):
        return _audio_bucket(facts, dataset, geometry)
    size = size_of(file)
    found = image_bucket(size, dataset, geometry, seed=seed, digest=file.digest)
    if isinstance(found, UnfitFile):
        return found
    bucket = Bucket(*found)
    scaled = fit_image(size, bucket, dataset, geometry, seed=seed, digest=file.digest, variant=0).resized
    if scaled[0] * scaled[1] > MAX_PIXELS:
        detail = f"{size[0]}x{size[1]} would be scaled to {scaled[0]}x{scaled[1]}; lower the resolution"
        return UnfitFile(f"more than {MAX_PIXELS / 1e6:.0f} megapixels when scaled", detail)
    if isinstance(facts, ImageFacts):
        return bucket
    frames = _frames(facts, dataset, geometry)
    return frames if isinstance(frames, UnfitFile) else replace(bucket, frames=frames)


def _frames(facts: VideoFacts, dataset: Dataset, geometry: Geometry) -> int | UnfitFile:
    return clip_frames(available_frames(facts, dataset.video), dataset.video, geometry)


def audio_rate(dataset: Dataset, geometry: Geometry, facts: AudioFacts) -> int:
    """The sample rate of the config, or else of the model, or else of the file."""
    return dataset.audio.sample_rate or geometry.sample_rate or facts.sample_rate


def _audio_bucket(facts: AudioFacts, dataset: Dataset, geometry: Geometry) -> Bucket | UnfitFile:
    rate = audio_rate(dataset, geometry, facts)
    samples = audio_length(facts.duration, dataset.audio, geometry, rate)
    if isinstance(samples, UnfitFile):
        return samples
    channels = dataset.audio.channels or geometry.channels or facts.channels
    return Bucket(audio_samples=samples, audio_channels=channels)


def sort_into_buckets(
    files: Iterable[MediaFile], dataset: Dataset, geometry: Geometry, seed: int
) -> tuple[list[Item], list[Dropped]]:
    """Assign each file to its bucket, or drop it with a reason."""
    items: list[Item] = []
    dropped: list[Dropped] = []
    buckets: dict[Bucket, Bucket] = {}
    for file in files:
        bucket = bucket_of(file, dataset, geometry, seed)
        if isinstance(bucket, UnfitFile):
            dropped.append(Dropped(file.path, bucket.reason, bucket.detail))
        else:
            # Share one Bucket object between files: the garbage collector traverses every object of the index.
            items.append(Item(file, buckets.setdefault(bucket, bucket), visits=1 + dataset.repeats))
    return items, dropped


def limit_items(items: list[Item], dataset: Dataset) -> tuple[list[Item], list[Dropped]]:
    """Keep at most `max_samples` items: the same ones in every run, and mostly the same when files are added."""
    limit = dataset.max_samples
    if limit is None or len(items) <= limit:
        return items, []
    # Sort by a hash of the content, which does not depend on the other files.
    chosen = sorted(items, key=lambda item: (random_bits(0, dataset.id, item.file.digest), item.path))[:limit]
    kept = {item.path for item in chosen}
    dropped = [
        Dropped(item.path, f"beyond max_samples {limit}", "not among the files selected at random")
        for item in items
        if item.path not in kept
    ]
    return [item for item in items if item.path in kept], dropped


def split_held_out(items: list[Item], dataset: Dataset) -> tuple[list[Item], list[Item]]:
    """The items to train on, and the `held_out` ones."""
    chosen = sorted(items, key=lambda item: (random_bits(0, "held out", item.file.digest), item.path))[
        : dataset.held_out
    ]
    paths = {item.path for item in chosen}
    return [item for item in items if item.path not in paths], [item for item in items if item.path in paths]


def kohya_folders(paths: Sequence[str]) -> dict[str, KohyaFolder]:
    """The top-level folders of a dataset in the layout of kohya's scripts, by name; empty for any other layout.

    Every file must be in such a folder and every folder must have a plausible count. A folder `2023_holiday` must not
    be visited 2,023 times.
    """
    tops = {path.partition("/")[0] if "/" in path else "" for path in paths}
    found = {name: kohya_folder(name) for name in tops}
    folders = {name: folder for name, folder in found.items() if folder is not None}
    numbered = len(folders) == len(found) and all(folder.visits <= MOST_FOLDER_VISITS for folder in folders.values())
    return folders if numbered else {}


def same_stem(paths: Iterable[str]) -> dict[str, list[str]]:
    """Groups of paths that differ only in their extension, by their common stem."""
    stems: dict[str, list[str]] = {}
    for path in paths:
        stems.setdefault(stem_of(path), []).append(path)
    return {stem: sorted(group) for stem, group in stems.items() if len(group) > 1}


def stem_of(path: str) -> str:
    """The path without its extension."""
    return split_suffix(path)[0]
