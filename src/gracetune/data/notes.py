"""Notes about a dataset that a user should read before training on it. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gracetune.data.bucket_rules import BucketRequest
from gracetune.data.buckets import scaled_size
from gracetune.data.captions import KohyaFolder
from gracetune.data.clips import is_padded
from gracetune.data.geometry import Geometry
from gracetune.data.index import freshness
from gracetune.data.items import DatasetIndex, Item, audio_rate, same_stem
from gracetune.data.media import EXTENSIONS
from gracetune.data.media.probe import AudioFacts
from gracetune.data.staging.file_selection import reasons
from gracetune.data.text_format import counted, some

ENLARGED = 1.05
"""Smaller enlargements come from rounding and are not visible."""

_CAPTIONS = {
    "missing": "without a caption",
    "empty": "with an empty caption",
    "default": "without a caption, trained with captions.default",
    "folder": "without a caption, trained with the folder's name",
}


def notes_on(index: DatasetIndex, folders: Mapping[str, KohyaFolder], geometry: Geometry) -> list[str]:
    return [
        *_unreadable(index),
        *_captions(index),
        *_folders(index, folders),
        *_shared_names(index),
        *_enlarged(index, geometry),
        *_padded(index, geometry),
        *_fixed_crops(index),
        *_images_beside_videos(index),
        *_left_out(index),
    ]


def _unreadable(index: DatasetIndex) -> Iterator[str]:
    for one in index.unreadable:
        yield f"left out, unreadable: {one.path}: {one.reason}"


def _captions(index: DatasetIndex) -> Iterator[str]:
    for origin, sentence in _CAPTIONS.items():
        found = [item for item in index.items if item.caption_origin == origin]
        if found:
            # Without a caption, the text may still consist of a trigger word or an instance prompt.
            text = found[0].captions[0]
            only = f', trained with "{text}" only' if text and origin in ("missing", "empty") else ""
            yield f"{counted(len(found), 'sample')} {sentence}{only}: {some([item.path for item in found])}"


def _folders(index: DatasetIndex, folders: Mapping[str, KohyaFolder]) -> Iterator[str]:
    if not folders:
        return
    if index.dataset.repeats:
        yield f"the numbers of {some(sorted(folders))} are not used, because repeats is {index.dataset.repeats}"
        return
    listed = [f"{name} ({folder.visits} visits an epoch)" for name, folder in sorted(folders.items())]
    yield f"folders in the layout of kohya's scripts: {some(listed)}"


def _shared_names(index: DatasetIndex) -> Iterator[str]:
    shared = same_stem(item.path for item in index.items)
    if shared:
        first = " and ".join(next(iter(shared.values())))
        yield f"{counted(len(shared), 'name')} used by several files, which share their caption: {first}"


def _enlarged(index: DatasetIndex, geometry: Geometry) -> Iterator[str]:
    visual = [item for item in index.items if not isinstance(item.file.facts, AudioFacts)]
    factors = {item.path: _scale(item, index, geometry) for item in visual}
    large = {path: factor for path, factor in factors.items() if factor > ENLARGED}
    if large:
        worst = max(large, key=lambda path: large[path])
        yield (
            f"{counted(len(large), 'sample')} smaller than the bucket and enlarged, {worst} by {large[worst]:.1f}x; "
            "set minimum_size to leave them out"
        )


def _scale(item: Item, index: DatasetIndex, geometry: Geometry) -> float:
    """The factor by which an item is scaled; above 1 it is enlarged."""
    wanted = BucketRequest.of(item.size, item.bucket.width / item.bucket.height, index.dataset, geometry)
    return scaled_size(wanted, (item.bucket.width, item.bucket.height))[0] / item.size[0]


def _padded(index: DatasetIndex, geometry: Geometry) -> Iterator[str]:
    short = []
    for item in index.items:
        facts = item.file.facts
        if isinstance(facts, AudioFacts):
            rate = audio_rate(index.dataset, geometry, facts)
            if is_padded(facts, item.bucket.audio_samples, rate):
                short.append(item.path)
    if short:
        interval = index.dataset.audio.duration_interval
        files = counted(len(short), "audio file")
        yield f"{files} shorter than {interval:g} s and padded with silence: {some(short)}"


def _fixed_crops(index: DatasetIndex) -> Iterator[str]:
    dataset = index.dataset
    random = [
        name
        for name, is_random in (
            ("crops", dataset.crop.enabled and dataset.crop.style == "random" and dataset.dataset_type != "audio"),
            ("clips", dataset.dataset_type == "video" and dataset.video.clip == "random"),
            ("audio clips", dataset.dataset_type == "audio" and dataset.audio.truncation == "random"),
        )
        if is_random
    ]
    if random and freshness(dataset) == "once":
        yield (
            f"random {' and '.join(random)} are chosen once per file, because latents are cached once; "
            "set augmentation.cache_mode to refresh_each_epoch to choose new ones every epoch"
        )


def _images_beside_videos(index: DatasetIndex) -> Iterator[str]:
    others = index.others or {}
    count = sum(number for name, number in others.items() if name.removeprefix(".") in EXTENSIONS["image"])
    if index.dataset.dataset_type == "video" and count:
        yield f"left out: {counted(count, 'image')} next to the videos; to train on them, add a dataset of type image"


def _left_out(index: DatasetIndex) -> Iterator[str]:
    for reason, count in reasons(index.left_out):
        yield f"{counted(count, 'file')} skipped: {reason}"
