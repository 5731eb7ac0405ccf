"""Buckets: the shape a file is trained in, and how it is scaled and cropped to it. All functions are pure.

The dataset's rule (`bucket_rules`) chooses an image's bucket, with sides the model supports. The image is scaled until
it covers the bucket, and the rest is cropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gracetune.config.dataset_config import Audio, Dataset, Video
from gracetune.data.bucket_rules import RULES, BucketRequest, Size, measure
from gracetune.data.geometry import Geometry
from gracetune.data.refs import Bucket, Fit
from gracetune.seeded_random import below

MOST_EXTREME_ASPECT = 16.0
"""Images beyond this ratio have shapes no model was trained on. Where only the shorter edge is fixed, they would also
need too much memory."""


@dataclass(frozen=True)
class UnfitFile:
    """Why a file is not trained on."""

    reason: str
    """The same text for all files with this reason, so that they can be counted."""
    detail: str
    """About this file."""


def rounded_aspect(size: Size, decimals: int) -> float:
    """Width / height, rounded, and never 0 for very narrow images."""
    return max(10.0**-decimals, round(size[0] / size[1], decimals))


def unfit_image(size: Size, dataset: Dataset) -> UnfitFile | None:
    """Why the dataset's filters reject an image of this size; None if they accept it."""
    found = measure(size, dataset.resolution_type)
    shown = f"{size[0]}x{size[1]}"
    if found < dataset.minimum_size:
        unit = {"pixel": " on its shorter side", "pixel_area": " on the side of a square", "area": " megapixels"}
        return UnfitFile(
            f"smaller than minimum_size {dataset.minimum_size:g}",
            f"{shown} is {found:.4g}{unit[dataset.resolution_type]}",
        )
    if min(size) < dataset.minimum_edge:
        return UnfitFile(f"a side below minimum_edge {dataset.minimum_edge:g}", shown)
    aspect = size[0] / size[1]
    if dataset.buckets.rule != "rounded_edge" and (unfit := _unfit_aspect(aspect, dataset, shown)) is not None:
        return unfit
    keeps_shape = not dataset.crop.enabled or dataset.crop.aspect == "preserve"
    if keeps_shape and max(aspect, 1 / aspect) > MOST_EXTREME_ASPECT:
        return UnfitFile(f"an aspect ratio beyond {MOST_EXTREME_ASPECT:g}:1", f"{shown}; crop it, or set crop.enabled")
    return None


def _unfit_aspect(aspect: float, dataset: Dataset, shown: str) -> UnfitFile | None:
    if dataset.minimum_aspect_ratio is not None and aspect < dataset.minimum_aspect_ratio:
        return UnfitFile(
            f"narrower than minimum_aspect_ratio {dataset.minimum_aspect_ratio:g}", f"{shown} is {aspect:.3g}"
        )
    if dataset.maximum_aspect_ratio is not None and aspect > dataset.maximum_aspect_ratio:
        return UnfitFile(
            f"wider than maximum_aspect_ratio {dataset.maximum_aspect_ratio:g}", f"{shown} is {aspect:.3g}"
        )
    return None


def trained_aspect(size: Size, dataset: Dataset, *, seed: int, digest: str) -> float:
    """The aspect ratio of the bucket. A random ratio depends on the file only, because it decides the cached shape."""
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


def image_bucket(size: Size, dataset: Dataset, geometry: Geometry, *, seed: int, digest: str) -> Size | UnfitFile:
    """The size an image is trained at. It depends only on the content and the settings, and caches rely on that."""
    unfit = unfit_image(size, dataset)
    if unfit is not None:
        return unfit
    wanted = BucketRequest.of(size, trained_aspect(size, dataset, seed=seed, digest=digest), dataset, geometry)
    bucket = RULES[dataset.buckets.rule].bucket(wanted)
    if dataset.buckets.rule == "rounded_edge":
        aspect = rounded_aspect(bucket, dataset.buckets.aspect_decimals)
        return _unfit_aspect(aspect, dataset, f"{size[0]}x{size[1]} in a bucket of {bucket[0]}x{bucket[1]}") or bucket
    return bucket


def scaled_size(wanted: BucketRequest, target: Size) -> Size:
    """The size an image is scaled to before it is cropped.

    By default a crop shows as much of the scene as fits. With `downsample_to`, a cropped image is scaled to that size,
    so that a crop shows a part of the scene. With `maximum_size` as well, only larger images are scaled down.
    """
    dataset, rule = wanted.dataset, RULES[wanted.dataset.buckets.rule]
    smallest = rule.scaled(wanted, target)
    if not dataset.crop.enabled or dataset.downsample_to is None:
        return smallest
    is_larger = dataset.maximum_size is None or measure(wanted.size, dataset.resolution_type) > dataset.maximum_size
    size = rule.downsampled(wanted, dataset.downsample_to) if is_larger else wanted.size
    return size if size[0] >= smallest[0] and size[1] >= smallest[1] else smallest


def fit_image(
    original: Size, bucket: Bucket, dataset: Dataset, geometry: Geometry, *, seed: int, digest: str, variant: int
) -> Fit:
    """The scaled size and crop of an image. `variant` moves a random crop; it stays 0 if latents are cached once."""
    wanted = BucketRequest.of(original, trained_aspect(original, dataset, seed=seed, digest=digest), dataset, geometry)
    scaled = scaled_size(wanted, (bucket.width, bucket.height))
    spare = scaled[0] - bucket.width, scaled[1] - bucket.height  # the pixels to crop, horizontally and vertically
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
    """The largest k * step + 1 that is at most `frames`: the lengths a video VAE supports."""
    return frames - (frames - 1) % step


def clip_frames(available: int, video: Video, geometry: Geometry) -> int | UnfitFile:
    """The length in frames of the clip taken from a video with `available` frames at the sampled frame rate."""
    if video.frame_step is not None:
        available = fitting_frames(available, video.frame_step)
    if video.max_frames is not None and available > video.max_frames:
        return UnfitFile(f"longer than video.max_frames {video.max_frames}", f"{available} frames")
    if video.from_length or (video.bucket_strategy == "resolution_frames" and video.num_frames is None):
        interval = video.frame_interval or 1
        whole = available - available % interval
        if whole < 1:
            return UnfitFile(f"shorter than video.frame_interval {interval}", f"{available} frames")
        wanted = fitting_frames(whole, geometry.frame_step)
    else:
        wanted = video.num_frames or geometry.default_frames
        if available < wanted and video.allow_shorter:
            wanted = available = fitting_frames(available, geometry.frame_step)
        elif available < wanted and video.frame_choice != "numbers":
            return UnfitFile(f"shorter than a clip of {wanted} frames", f"{available} frames")
    length = wanted if video.from_length else available
    if video.min_frames is not None and length < video.min_frames:
        return UnfitFile(f"shorter than video.min_frames {video.min_frames}", f"{available} frames")
    return wanted


def audio_length(seconds: float, audio: Audio, geometry: Geometry, rate: int) -> int | UnfitFile:
    """The length in samples of the clip taken from an audio file: whole intervals, and whole columns of the latents.

    Audio shorter than one interval is padded with silence to one interval.
    """
    if audio.max_duration_seconds is not None and seconds > audio.max_duration_seconds:
        return UnfitFile(f"longer than audio.max_duration_seconds {audio.max_duration_seconds:g}", f"{seconds:.1f} s")
    # The tolerance keeps a file of exactly 3 intervals from losing the third to a rounding error.
    intervals = max(1, math.floor(seconds / audio.duration_interval + 1e-6))
    taken = intervals * audio.duration_interval
    if geometry.max_audio_seconds is not None:
        taken = min(taken, geometry.max_audio_seconds)
    samples = round(taken * rate)
    return max(geometry.audio_multiple, samples - samples % geometry.audio_multiple)
