"""Which shape a file is trained in, and how it is brought there. Pure: sizes and rules in, sizes out.

A picture goes to the bucket whose area and aspect ratio are nearest to what the dataset asks for, with sides the model
can take. It is scaled until it just covers the bucket, and what stands over is cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gracetune.config.dataset_config import Audio, Dataset, Video
from gracetune.data.geometry import Geometry
from gracetune.data.refs import Bucket, Fit
from gracetune.seeded_random import below

Size = tuple[int, int]
"""Width and height."""

ASPECT_DECIMALS = 2
"""Aspect ratios are compared to this many decimals, as in SimpleTuner: 1.5 and 1.504 share a bucket."""
_ROUND_MEGAPIXELS = {0.25: 512.0, 1.0: 1024.0, 4.0: 2048.0}
"""What people mean by these: the square everyone trains at, not the 2-5 % smaller one of exactly that many pixels."""


MOST_EXTREME_ASPECT = 16.0
"""Strips beyond this become shapes no model has seen, and where only the shorter edge is fixed they fill the memory."""


@dataclass(frozen=True)
class Unfit:
    """Why a file is not trained on: `reason` is counted, `detail` is about this file."""

    reason: str
    detail: str


def rounded_aspect(size: Size) -> float:
    """Width / height; never 0, however narrow a strip is."""
    return max(10.0**-ASPECT_DECIMALS, round(size[0] / size[1], ASPECT_DECIMALS))


def measure(size: Size, resolution_type: str) -> float:
    """A picture in the unit its dataset's sizes are given in: shorter edge, edge of the equal square, or megapixels."""
    width, height = size
    if resolution_type == "pixel":
        return float(min(width, height))
    if resolution_type == "pixel_area":
        return math.sqrt(width * height)
    return width * height / 1e6


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
    aspect = size[0] / size[1]
    if dataset.minimum_aspect_ratio is not None and aspect < dataset.minimum_aspect_ratio:
        return Unfit(f"narrower than minimum_aspect_ratio {dataset.minimum_aspect_ratio:g}", f"{shown} is {aspect:.3g}")
    if dataset.maximum_aspect_ratio is not None and aspect > dataset.maximum_aspect_ratio:
        return Unfit(f"wider than maximum_aspect_ratio {dataset.maximum_aspect_ratio:g}", f"{shown} is {aspect:.3g}")
    keeps_shape = not dataset.crop.enabled or dataset.crop.aspect == "preserve"
    if keeps_shape and max(aspect, 1 / aspect) > MOST_EXTREME_ASPECT:
        return Unfit(f"a strip of more than {MOST_EXTREME_ASPECT:g}:1", f"{shown}; crop it, or set crop.enabled")
    return None


def trained_aspect(size: Size, dataset: Dataset, *, seed: int, digest: str) -> float:
    """The aspect ratio of the bucket. A random one is drawn once per file: it decides the shape of what is cached."""
    crop = dataset.crop
    own = rounded_aspect(size)
    if not crop.enabled or crop.aspect == "preserve":
        return own
    if crop.aspect == "square":
        return 1.0
    if crop.aspect == "closest":
        return min(crop.aspect_buckets, key=lambda ratio: (abs(math.log(ratio / own)), ratio))
    return crop.aspect_buckets[below(len(crop.aspect_buckets), seed, "aspect", digest)]


def bucket_size(aspect: float, dataset: Dataset, multiple: int) -> Size:
    """The size nearest to the asked resolution that has this aspect ratio and sides the model can take."""
    resolution = dataset.resolution
    if dataset.resolution_type == "pixel":
        width = resolution * max(aspect, 1.0)
        height = resolution / min(aspect, 1.0)
    else:
        edge = resolution if dataset.resolution_type == "pixel_area" else megapixel_edge(resolution)
        width, height = edge * math.sqrt(aspect), edge / math.sqrt(aspect)
    return nearest_multiple(width, multiple), nearest_multiple(height, multiple)


def megapixel_edge(megapixels: float) -> float:
    """Side of the square with that many pixels."""
    return _ROUND_MEGAPIXELS.get(megapixels, math.sqrt(megapixels * 1e6))


def nearest_multiple(value: float, multiple: int) -> int:
    return max(multiple, math.floor(value / multiple + 0.5) * multiple)


def cover(original: Size, target: Size) -> Size:
    """The smallest size of the same shape that covers `target`: one of its sides is exactly the target's."""
    (width, height), (wide, high) = original, target
    if wide * height >= high * width:
        return wide, max(high, (2 * height * wide + width) // (2 * width))
    return max(wide, (2 * width * high + height) // (2 * height)), high


def resized(original: Size, target: Size, dataset: Dataset) -> Size:
    """What the picture is scaled to before it is cut.

    With `maximum_size` and `downsample_to` a cropped picture keeps its own size up to the one and is scaled to the
    other above it, so that a crop shows a part of the scene; without them it shows as much of it as fits.
    """
    least = cover(original, target)
    if not dataset.crop.enabled or dataset.maximum_size is None or dataset.downsample_to is None:
        return least
    found = measure(original, dataset.resolution_type)
    scale = 1.0
    if found > dataset.maximum_size:
        scale = dataset.downsample_to / found
        scale = math.sqrt(scale) if dataset.resolution_type == "area" else scale
    wanted = round(original[0] * scale), round(original[1] * scale)
    return wanted if wanted[0] >= least[0] and wanted[1] >= least[1] else least


def fit_picture(original: Size, bucket: Bucket, dataset: Dataset, *, seed: int, digest: str, variant: int) -> Fit:
    """Scale and place. `variant` changes a random crop's place; it is 0 for good where latents are cached once."""
    scaled = resized(original, (bucket.width, bucket.height), dataset)
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
        if available < wanted:
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
