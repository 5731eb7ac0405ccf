"""The facts about a dataset that its memory depends on: number of files, their size, and the largest sample.

Only `survey` accesses a disk, and it reads file names and sizes only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.models.footprint import AudioLatents, Footprint, PixelLatents, SampleShape
from gracetune.units import MIB

Modality = Literal["image", "video", "audio"]

ASSUMED_SAMPLES = 1000
"""For a folder that is not visible on this machine."""
ASSUMED_FILE_BYTES: dict[Modality, int] = {"image": 2 * MIB, "video": 8 * MIB, "audio": 8 * MIB}
ASSUMED_ASPECT = 16 / 9
"""Aspect ratio of the widest image, if the config fixes only the shorter side and limits neither."""

_EXTENSIONS: dict[Modality, frozenset[str]] = {
    "image": frozenset([".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif", ".jxl"]),
    "video": frozenset([".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif", ".mpg", ".mpeg"]),
    "audio": frozenset([".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac"]),
}


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about one dataset; `assumed` states in words what had to be assumed."""

    id: str
    samples: int
    file_bytes: int
    assumed: str | None = None


def survey(
    config: RunConfig, samples: int | None = None, known: Mapping[str, DatasetFacts] | None = None, *,
    option: str | None = None,
) -> tuple[DatasetFacts, ...]:  # fmt: skip
    """Facts about every enabled dataset.

    `samples` is the user's number for folders that are not visible on this machine, and `option` the command-line
    option that sets it, if the command has one. `known` holds facts by dataset id that need no survey.
    """
    enabled = [dataset for dataset in config.datasets if not dataset.disabled]
    return tuple((known or {}).get(dataset.id) or _facts(dataset, samples, option) for dataset in enabled)


def _facts(dataset: Dataset, samples: int | None, option: str | None) -> DatasetFacts:
    modality = modality_of(dataset)
    folder = Path(dataset.path).expanduser()
    if folder.is_dir():
        sizes = sorted(_sizes(folder, _wanted(dataset, modality)))
        count = min(len(sizes), dataset.max_samples or len(sizes))
        total = sum(sizes) * count // len(sizes) if sizes else 0
        empty = None if sizes else f"dataset {dataset.id}: no {modality} files in {dataset.path}"
        return DatasetFacts(dataset.id, count, total, empty)
    count = dataset.max_samples or samples or ASSUMED_SAMPLES
    guess = "a guess" if option is None else f"a guess; say {option} N"
    source = "max_samples" if dataset.max_samples else (option or "as given") if samples else guess
    each = ASSUMED_FILE_BYTES[modality]
    words = f"dataset {dataset.id}: {dataset.path} is not visible here; {count} samples ({source})"
    if dataset.is_staged:
        words += f", files of {each // MIB} MiB"
    return DatasetFacts(dataset.id, count, count * each, words)


def modality_of(dataset: Dataset) -> Modality:
    if dataset.dataset_type in ("video", "audio"):
        return dataset.dataset_type
    return "image"


def _wanted(dataset: Dataset, modality: Modality) -> frozenset[str]:
    chosen = dataset.in_memory.file_extensions
    if not dataset.is_staged or not chosen:
        return _EXTENSIONS[modality]
    return frozenset(f".{extension.lower().lstrip('.')}" for extension in chosen)


def _sizes(folder: Path, extensions: frozenset[str]) -> Iterator[int]:
    for folder_path, _folders, names in os.walk(folder):
        for name in names:
            file = Path(folder_path, name)
            if file.suffix.lower() in extensions:
                try:
                    yield file.stat().st_size
                except OSError:
                    continue  # a dangling link; training reports it


@dataclass(frozen=True)
class LargestSample:
    """The largest sample a dataset can contain, and what had to be assumed."""

    shape: SampleShape
    assumed: str | None = None


def largest_sample(dataset: Dataset, footprint: Footprint) -> LargestSample:
    """Buckets of a fixed area all have about the same size. If only a side is fixed, the widest image counts."""
    latents = footprint.latents
    if isinstance(latents, AudioLatents):
        return _audio(dataset, latents)
    pixels, assumed = _pixels(dataset)
    cell = latents.spatial * latents.patch
    side = max(cell, round(math.sqrt(pixels) / cell) * cell)
    frames, assumed_frames = _frames(dataset, latents)
    notes = [note for note in (assumed, assumed_frames) if note]
    return LargestSample(SampleShape(side, side, frames), "; ".join(notes) or None)


def _audio(dataset: Dataset, latents: AudioLatents) -> LargestSample:
    longest = dataset.audio.max_duration_seconds
    if longest is None:
        words = f"dataset {dataset.id}: clips as long as the model takes, {latents.longest_seconds:.1f} s"
        return LargestSample(SampleShape(seconds=latents.longest_seconds), words)
    return LargestSample(SampleShape(seconds=longest))


def _pixels(dataset: Dataset) -> tuple[float, str | None]:
    """Pixels of the largest image, and what was assumed."""
    if dataset.resolution_type == "area":
        return dataset.resolution * 1e6, None
    if dataset.resolution_type == "pixel_area":
        return dataset.resolution**2, None
    crop = dataset.crop
    if crop.enabled and crop.aspect == "square":
        return dataset.resolution**2, None
    ratios = [max(ratio, 1 / ratio) for ratio in crop.aspect_buckets] if crop.enabled else []
    limits = [dataset.maximum_aspect_ratio, dataset.minimum_aspect_ratio]
    ratios = ratios or [max(limit, 1 / limit) for limit in limits if limit is not None]
    if ratios:
        return dataset.resolution**2 * max(ratios), None
    words = f"dataset {dataset.id}: no image wider than 16:9 (the shorter side is fixed, the other is not)"
    return dataset.resolution**2 * ASSUMED_ASPECT, words


def _frames(dataset: Dataset, latents: PixelLatents) -> tuple[int, str | None]:
    """Frames of the longest clip, and what was assumed."""
    video = dataset.video
    if dataset.dataset_type != "video" or latents.temporal == 1:
        return 1, None
    if video.from_length:
        longest = video.max_frames or latents.default_frames
        source = "video.max_frames" if video.max_frames else f"the family's {longest}"
        return longest, f"dataset {dataset.id}: clips of up to {longest} frames ({source})"
    return video.num_frames or latents.default_frames, None
