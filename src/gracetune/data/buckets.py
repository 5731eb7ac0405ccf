"""Which shape a file is trained in, and how it is brought there. Pure: sizes and rules in, sizes out.

A picture goes to the bucket that the dataset's rule (`bucket_rules`) gives it, with sides the model can take. It is
scaled until it covers the bucket, and what stands over is cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gracetune.config.dataset_config import Audio, Dataset, Video
from gracetune.data.bucket_rules import RULES, Size, Wanted, measure
from gracetune.data.geometry import Geometry
from gracetune.data.refs import Bucket, Fit
from gracetune.seeded_random import below

MOST_EXTREME_ASPECT = 16.0
"""Strips beyond this become shapes no model has seen, and where only the shorter edge is fixed they fill the memory."""


@dataclass(frozen=True)
class Unfit:
    """Why a file is not trained on: `reason` is counted, `detail` is about this file."""

    reason: str
    detail: str


def rounded_aspect(size: Size, decimals: int) -> float:
    """Width / height; never 0, however narrow a strip is."""
    return max(10.0**-decimals, round(size[0] / size[1], decimals))


def unfit_picture(size: Size, dataset: Dataset) -> Unfit | None:
    """What the dataset's filters have against a picture."""
    found = measure(size, dataset.resolution_type)
    shown = f"{size[0]}x{size[1]}"
    if found < dataset.minimum_size:
        unit = {"pixel": " on its shorter side", "pixel_area": " on the side of a square", "area": " megapixels"}
        return Unfit(
            f"smaller than minimum_size {dataset.minimum_size:g}",
            f"{shown} is {found:.4g}{unit[dataset.resolution_type]}",
        )
    if min(size) < dataset.minimum_edge:
        return Unfit(f"a side below minimum_edge {dataset.minimum_edge:g}", shown)
    aspect = size[0] / size[1]
    if dataset.buckets.rule != "rounded_edge" and (unfit := _unfit_aspect(aspect, dataset, shown)) is not None:
        return unfit
    keeps_shape = not dataset.crop.enabled or dataset.crop.aspect == "preserve"
    if keeps_shape and max(aspect, 1 / aspect) > MOST_EXTREME_ASPECT:
        return Unfit(f"a strip of more than {MOST_EXTREME_ASPECT:g}:1", f"{shown}; crop it, or set crop.enabled")
    return None


def _unfit_aspect(aspect: float, dataset: Dataset, shown: str) -> Unfit | None:
    if dataset.minimum_aspect_ratio is not None and aspect < dataset.minimum_aspect_ratio:
        return Unfit(f"narrower than minimum_aspect_ratio {dataset.minimum_aspect_ratio:g}", f"{shown} is {aspect:.3g}")
    if dataset.maximum_aspect_ratio is not None and aspect > dataset.maximum_aspect_ratio:
        return Unfit(f"wider than maximum_aspect_ratio {dataset.maximum_aspect_ratio:g}", f"{shown} is {aspect:.3g}")
    return None


def trained_aspect(size: Size, dataset: Dataset, *, seed: int, digest: str) -> float:
    """The aspect ratio of the bucket. A random one is drawn once per file: it decides the shape of what is cached."""
    crop = dataset.crop
    own = rounded_aspect(size, dataset.buckets.aspect_decimals)
    if not crop.enabled or crop.aspect == "preserve":
        return own
    if crop.aspect == "square":
        return 1.0
    if crop.aspect == "closest" and dataset.buckets.rule == "rounded_edge":
        return min(crop.aspect_buckets, key=lambda ratio: abs(ratio - own))
    if crop.aspect == "closest":
        return min(crop.aspect_buckets, key=lambda ratio: (abs(math.log(ratio / own)), ratio))
    return crop.aspect_buckets[below(len(crop.aspect_buckets), seed, "aspect", digest)]


def picture_bucket(size: Size, dataset: Dataset, geometry: Geometry, *, seed: int, digest: str) -> Size | Unfit:
    """The size an image is trained at. A function of its content and the settings alone: caches rely on it."""
    unfit = unfit_picture(size, dataset)
    if unfit is not None:
        return unfit
    wanted = Wanted.of(size, trained_aspect(size, dataset, seed=seed, digest=digest), dataset, geometry)
    bucket = RULES[dataset.buckets.rule].bucket(wanted)
    if dataset.buckets.rule == "rounded_edge":
        aspect = rounded_aspect(bucket, dataset.buckets.aspect_decimals)
        return _unfit_aspect(aspect, dataset, f"{size[0]}x{size[1]} in a bucket of {bucket[0]}x{bucket[1]}") or bucket
    return bucket


def resized(wanted: Wanted, target: Size) -> Size:
    """What the picture is scaled to before it is cut.

    With `downsample_to` a cropped picture is scaled to that, so that a crop shows a part of the scene; with
    `maximum_size` too it keeps its own size up to that. Without them a crop shows as much of the scene as fits.
    """
    dataset, rule = wanted.dataset, RULES[wanted.dataset.buckets.rule]
    least = rule.scaled(wanted, target)
    if not dataset.crop.enabled or dataset.downsample_to is None:
        return least
    larger = dataset.maximum_size is None or measure(wanted.size, dataset.resolution_type) > dataset.maximum_size
    asked = rule.downsampled(wanted, dataset.downsample_to) if larger else wanted.size
    return asked if asked[0] >= least[0] and asked[1] >= least[1] else least


def fit_picture(
    original: Size, bucket: Bucket, dataset: Dataset, geometry: Geometry, *, seed: int, digest: str, variant: int
) -> Fit:
    """Scale and place. `variant` changes a random crop's place; it is 0 for good where latents are cached once."""
    wanted = Wanted.of(original, trained_aspect(original, dataset, seed=seed, digest=digest), dataset, geometry)
    scaled = resized(wanted, (bucket.width, bucket.height))
    spare = scaled[0] - bucket.width, scaled[1] - bucket.height
    style = dataset.crop.style if dataset.crop.enabled else "center"
    if style == "random":
        left = below(spare[0] + 1, seed, "left", digest, variant)
        top = below(spare[1] + 1, seed, "top", digest, variant)
    elif style == "corner":
        left = top = 0
    else:
        left, top = spare[0] // 2, spare[1] // 2
    return Fit(original, scaled, left, top)


def fitting_frames(frames: int, step: int) -> int:
    """The largest k * step + 1 that is at most `frames`."""
    return frames - (frames - 1) % step


def clip_frames(available: int, video: Video, geometry: Geometry) -> int | Unfit:
    """Frames of the clip cut from a video that has `available` of them at the rate they are taken."""
    if video.frame_step is not None:
        available = fitting_frames(available, video.frame_step)
    if video.max_frames is not None and available > video.max_frames:
        return Unfit(f"longer than video.max_frames {video.max_frames}", f"{available} frames")
    if video.from_length or (video.bucket_strategy == "resolution_frames" and video.num_frames is None):
        interval = video.frame_interval or 1
        whole = available - available % interval
        if whole < 1:
            return Unfit(f"shorter than video.frame_interval {interval}", f"{available} frames")
        wanted = fitting_frames(whole, geometry.frame_step)
    else:
        wanted = video.num_frames or geometry.default_frames
        if available < wanted and video.allow_shorter:
            wanted = available = fitting_frames(available, geometry.frame_step)
        elif available < wanted and video.frame_choice != "numbers":
            return Unfit(f"shorter than a clip of {wanted} frames", f"{available} frames")
    length = wanted if video.from_length else available
    if video.min_frames is not None and length < video.min_frames:
        return Unfit(f"shorter than video.min_frames {video.min_frames}", f"{available} frames")
    return wanted


def audio_length(seconds: float, audio: Audio, geometry: Geometry, rate: int) -> int | Unfit:
    """Samples of the piece taken from a sound of that length: whole intervals, and whole columns of the latents.

    A sound shorter than one interval fills one, followed by silence.
    """
    if audio.max_duration_seconds is not None and seconds > audio.max_duration_seconds:
        return Unfit(f"longer than audio.max_duration_seconds {audio.max_duration_seconds:g}", f"{seconds:.1f} s")
    # A file of exactly 3 intervals must not miss its third by a rounding error.
    intervals = max(1, math.floor(seconds / audio.duration_interval + 1e-6))
    taken = intervals * audio.duration_interval
    if geometry.max_audio_seconds is not None:
        taken = min(taken, geometry.max_audio_seconds)
    samples = round(taken * rate)
    return max(geometry.audio_multiple, samples - samples % geometry.audio_multiple)
