"""Bucket rules (`buckets.rule`): pure functions that choose an image's bucket and the size it is scaled to.

- `nearest`: round each side to the nearest multiple, from the resolution and the aspect ratio.
- `at_most`: keep the area at or below the resolution's and close to the image's own, so that images are not enlarged.
- `rounded_edge`: round the edge of the square to a multiple first, then the sides. For common megapixel values the
  square has a round edge such as 1024.

Every rule scales an image until it covers its bucket. The rules differ only in how they round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gracetune.config.dataset_config import Dataset
from gracetune.data.geometry import Geometry

Size = tuple[int, int]
"""Width and height."""

_ROUND_MEGAPIXELS = {0.25: 512.0, 1.0: 1024.0, 4.0: 2048.0}
"""The square people mean by these values: 1024 x 1024 for 1 megapixel, not the 2-5 % smaller square of 1,000,000."""
_SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}
"""The same for `rounded_edge`, which also applies it to values within `_TOLERANCE` megapixels of these."""
_TOLERANCE = 0.05


@dataclass(frozen=True)
class BucketRequest:
    """The input of a bucket rule."""

    size: Size
    """The image's size."""
    aspect: float
    """The bucket's aspect ratio, rounded."""
    dataset: Dataset
    multiple: int
    """The sides of buckets are multiples of this."""
    least: int
    """The smallest multiple the model supports. Squares keep the requested edge and are rounded only to this."""

    @property
    def is_square(self) -> bool:
        return self.dataset.crop.enabled and self.dataset.crop.aspect == "square"

    @classmethod
    def of(cls, size: Size, aspect: float, dataset: Dataset, geometry: Geometry) -> BucketRequest:
        multiple = dataset.buckets.multiple or geometry.side_multiple
        return cls(size, aspect, dataset, multiple, geometry.least_multiple)


@dataclass(frozen=True)
class BucketRule:
    bucket: Callable[[BucketRequest], Size]
    """The image's bucket."""
    scaled: Callable[[BucketRequest, Size], Size]
    """The size the image is scaled to so that it covers the given bucket."""
    downsampled: Callable[[BucketRequest, float], Size]
    """The size an image is scaled to by `downsample_to`."""


# -- nearest -----------------------------------------------------------------------------------------------------------


def nearest_size(aspect: float, dataset: Dataset, multiple: int) -> Size:
    """The size nearest to the dataset's resolution with this aspect ratio and sides that are multiples."""
    resolution = dataset.resolution
    if dataset.resolution_type == "pixel":
        width = resolution * max(aspect, 1.0)
        height = resolution / min(aspect, 1.0)
    else:
        edge = resolution if dataset.resolution_type == "pixel_area" else megapixel_edge(resolution)
        width, height = edge * math.sqrt(aspect), edge / math.sqrt(aspect)
    return nearest_multiple(width, multiple), nearest_multiple(height, multiple)


def megapixel_edge(megapixels: float) -> float:
    """The side of the square with that many pixels."""
    return _ROUND_MEGAPIXELS.get(megapixels, math.sqrt(megapixels * 1e6))


def nearest_multiple(value: float, multiple: int) -> int:
    """The nearest multiple, at least one; halves are rounded up."""
    return max(multiple, math.floor(value / multiple + 0.5) * multiple)


def cover(original: Size, target: Size) -> Size:
    """The smallest size with the original's aspect ratio that covers `target`. One side equals the target's.

    The other is rounded to the nearest integer in integer arithmetic, so the result is the same on every machine.
    """
    (width, height), (wide, high) = original, target
    if wide * height >= high * width:
        return wide, max(high, (2 * height * wide + width) // (2 * width))
    return max(wide, (2 * width * high + height) // (2 * height)), high


def measure(size: Size, resolution_type: str) -> float:
    """An image's size in the unit of `resolution_type`: shorter edge, edge of the equal square, or megapixels."""
    width, height = size
    if resolution_type == "pixel":
        return float(min(width, height))
    if resolution_type == "pixel_area":
        return math.sqrt(width * height)
    return width * height / 1e6


def _scaled_to(wanted: BucketRequest, target: float) -> Size:
    """The image scaled to `target` in the unit of `resolution_type`."""
    scale = target / measure(wanted.size, wanted.dataset.resolution_type)
    scale = math.sqrt(scale) if wanted.dataset.resolution_type == "area" else scale  # area grows with the square
    return round(wanted.size[0] * scale), round(wanted.size[1] * scale)


# -- at_most -----------------------------------------------------------------------------------------------------------


def _at_most(wanted: BucketRequest) -> Size:
    if wanted.is_square:
        edge = round(math.sqrt(_target_area(wanted)))
        return (nearest_multiple(edge, wanted.least),) * 2
    (width, height), step = _cut_to_aspect(wanted), wanted.multiple
    own_area, max_area = width * height, _target_area(wanted)
    area = min(own_area, max_area)
    scale = (area / own_area) ** 0.5
    # The exact size in units of `step`. Of the four ways to round it, take the area closest to the image's.
    across, down = width * scale / step, height * scale / step
    candidates = [
        (columns * step, rows * step)
        for columns in (math.floor(across), math.ceil(across))
        for rows in (math.floor(down), math.ceil(down))
        if columns and rows and columns * rows * step * step <= max_area
    ]
    if not candidates:
        return max(step, math.floor(across) * step), max(step, math.floor(down) * step)
    return min(candidates, key=lambda found: abs(found[0] * found[1] - area))


def _target_area(wanted: BucketRequest) -> float:
    """The area in pixels of the dataset's resolution. With `pixel` it is that of the shorter side."""
    dataset, (width, height) = wanted.dataset, wanted.size
    if dataset.resolution_type == "area":
        return megapixel_edge(dataset.resolution) ** 2
    area = dataset.resolution * dataset.resolution
    aspect = max(width, height) / min(width, height)
    return area * aspect if dataset.resolution_type == "pixel" and not wanted.is_square else area


def _cut_to_aspect(wanted: BucketRequest) -> tuple[float, float]:
    """The size of the image, or of its largest part with the aspect ratio of the crop."""
    (width, height), crop = wanted.size, wanted.dataset.crop
    if not crop.enabled or crop.aspect == "preserve":
        return width, height
    return min(width, height * wanted.aspect), min(height, width / wanted.aspect)


def _scaled_up(wanted: BucketRequest, bucket: Size) -> Size:
    """The image scaled to cover the bucket, with both sides rounded up."""
    (width, height), (wide, high) = wanted.size, bucket
    scale = max(wide / width, high / height)
    return math.ceil(width * scale), math.ceil(height * scale)


# -- rounded_edge ------------------------------------------------------------------------------------------------------


def _rounded_edge(wanted: BucketRequest) -> Size:
    sides, _ = _edges(wanted, wanted.aspect, wanted.dataset.resolution)
    decimals = wanted.dataset.buckets.aspect_decimals
    if wanted.is_square or round(sides[0] / sides[1], decimals) == 1.0:
        return (nearest_multiple(_square_edge(wanted), wanted.least),) * 2
    return sides


def _square_edge(wanted: BucketRequest) -> int:
    dataset = wanted.dataset
    if dataset.resolution_type == "pixel":
        return int(dataset.resolution)
    megapixels = _megapixels(dataset.resolution, dataset)
    common = next((edge for size, edge in _SQUARES.items() if abs(megapixels - size) < _TOLERANCE), None)
    return _to_multiple(math.sqrt(megapixels * 1e6), wanted.multiple) if common is None else common


def _megapixels(resolution: float, dataset: Dataset) -> float:
    return resolution * resolution / 1e6 if dataset.resolution_type == "pixel_area" else resolution


def _to_multiple(value: float, multiple: int) -> int:
    """The nearest multiple, at least one; halves go to the even multiple, as Python's `round` does."""
    return max(multiple, round(value / multiple) * multiple)


def _edges(wanted: BucketRequest, aspect: float, resolution: float) -> tuple[Size, Size]:
    """The sides of the bucket, and the size the image is scaled to for it.

    The order of roundings follows SimpleTuner, whose configs use this rule: other rounding would move images to other
    buckets.
    """
    if wanted.dataset.resolution_type == "pixel":
        return _edges_by_side(wanted, aspect, int(resolution))
    edge = _to_multiple(int(math.sqrt(_megapixels(resolution, wanted.dataset) * 1e6)), wanted.multiple)
    width, height = wanted.size
    if aspect == 1.0 and width == height:
        return (edge, edge), (edge, edge)
    sides = (
        _to_multiple(edge * math.sqrt(aspect), wanted.multiple),
        _to_multiple(edge / math.sqrt(aspect), wanted.multiple),
    )
    own_aspect = width / height
    scaled = (sides[0], int(sides[0] / own_aspect)) if sides[0] < sides[1] else (int(sides[1] * own_aspect), sides[1])
    if scaled[0] < sides[0]:
        missing = sides[0] - scaled[0]
        scaled = sides[0], scaled[1] + int(missing / own_aspect)
    elif scaled[1] < sides[1]:
        missing = sides[1] - scaled[1]
        scaled = scaled[0] + int(missing * own_aspect), sides[1]
    return sides, scaled


def _edges_by_side(wanted: BucketRequest, aspect: float, shorter: int) -> tuple[Size, Size]:
    """The same when the resolution is the length of the shorter side."""
    width, height = wanted.size
    exact = (shorter, int(shorter / aspect)) if width < height else (int(shorter * aspect), shorter)
    sides = _to_multiple(exact[0], wanted.multiple), _to_multiple(exact[1], wanted.multiple)
    own_aspect = width / height
    if own_aspect >= 1.0:
        high = max(sides[1], exact[1])
        scaled = int(high * own_aspect), high
        return sides, scaled if scaled[0] >= sides[0] else (sides[0], int(sides[0] / own_aspect))
    wide = max(sides[0], exact[0])
    scaled = wide, int(wide / own_aspect)
    return sides, scaled if scaled[1] >= sides[1] else (int(sides[1] * own_aspect), sides[1])


def _scaled_by_edge(wanted: BucketRequest, bucket: Size) -> Size:
    aspect = 1.0 if wanted.is_square else wanted.aspect
    _, scaled = _edges(wanted, aspect, wanted.dataset.resolution)
    return _covering(scaled, wanted, bucket)


def _covering(scaled: Size, wanted: BucketRequest, bucket: Size) -> Size:
    """The scaled size, enlarged if it does not cover the bucket.

    Rounding can leave an image one pixel short, and squares of a round edge are larger than the other buckets.
    """
    covers = scaled[0] >= bucket[0] and scaled[1] >= bucket[1]
    return scaled if covers else cover(wanted.size, bucket)


def _downsampled_by_edge(wanted: BucketRequest, target: float) -> Size:
    own_aspect = round(wanted.size[0] / wanted.size[1], wanted.dataset.buckets.aspect_decimals)
    # A very narrow strip rounds to 0, which would divide by zero.
    return _edges(wanted, own_aspect or 10.0**-wanted.dataset.buckets.aspect_decimals, target)[1]


RULES = {
    "nearest": BucketRule(
        lambda wanted: nearest_size(wanted.aspect, wanted.dataset, wanted.multiple),
        lambda wanted, bucket: cover(wanted.size, bucket),
        _scaled_to,
    ),
    "at_most": BucketRule(_at_most, _scaled_up, _scaled_to),
    "rounded_edge": BucketRule(_rounded_edge, _scaled_by_edge, _downsampled_by_edge),
}
