"""The rules by which an image gets its bucket (`buckets.rule`), and the size it is scaled to. Pure.

- `nearest`: each side is the multiple nearest to what the resolution and the aspect ratio ask for.
- `at_most`: the area is at most the resolution's and about the image's own, so that images are not enlarged.
- `rounded_edge`: the edge of the square is rounded to a multiple before the sides are, and so are the sides. Common
  megapixels and their neighbours have squares of a round edge.

Every rule scales an image until it covers its bucket; they differ in how they round.
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
"""What people mean by these: the square everyone trains at, not the 2-5 % smaller one of exactly that many pixels."""
_SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}
"""The same for `rounded_edge`, for whatever lies within `_ABOUT` of these megapixels."""
_ABOUT = 0.05


@dataclass(frozen=True)
class Wanted:
    """What a rule is asked for."""

    size: Size
    """Of the image."""
    aspect: float
    """Of the bucket, rounded."""
    dataset: Dataset
    multiple: int
    """Of the sides."""
    least: int
    """What the model takes at least: the multiple of sides that a rule leaves as they were asked for."""

    @property
    def is_square(self) -> bool:
        return self.dataset.crop.enabled and self.dataset.crop.aspect == "square"

    @classmethod
    def of(cls, size: Size, aspect: float, dataset: Dataset, geometry: Geometry) -> Wanted:
        multiple = dataset.buckets.multiple or geometry.side_multiple
        return cls(size, aspect, dataset, multiple, geometry.least_multiple)


@dataclass(frozen=True)
class BucketRule:
    bucket: Callable[[Wanted], Size]
    scaled: Callable[[Wanted, Size], Size]
    """What the image is scaled to: it covers the bucket given."""
    downsampled: Callable[[Wanted, float], Size]
    """What an image is scaled to by `downsample_to`."""


# -- nearest -----------------------------------------------------------------------------------------------------------


def nearest_size(aspect: float, dataset: Dataset, multiple: int) -> Size:
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


def measure(size: Size, resolution_type: str) -> float:
    """An image in the unit its dataset's sizes are given in: shorter edge, edge of the equal square, or megapixels."""
    width, height = size
    if resolution_type == "pixel":
        return float(min(width, height))
    if resolution_type == "pixel_area":
        return math.sqrt(width * height)
    return width * height / 1e6


def _scaled_to(wanted: Wanted, target: float) -> Size:
    scale = target / measure(wanted.size, wanted.dataset.resolution_type)
    scale = math.sqrt(scale) if wanted.dataset.resolution_type == "area" else scale
    return round(wanted.size[0] * scale), round(wanted.size[1] * scale)


# -- at_most -----------------------------------------------------------------------------------------------------------


def _at_most(wanted: Wanted) -> Size:
    if wanted.is_square:
        edge = round(math.sqrt(_asked_area(wanted)))
        return (nearest_multiple(edge, wanted.least),) * 2
    (width, height), step = _cut_to_aspect(wanted), wanted.multiple
    own, most = width * height, _asked_area(wanted)
    target = min(own, most)
    scale = (target / own) ** 0.5
    across, down = width * scale / step, height * scale / step
    candidates = [
        (columns * step, rows * step)
        for columns in (math.floor(across), math.ceil(across))
        for rows in (math.floor(down), math.ceil(down))
        if columns and rows and columns * rows * step * step <= most
    ]
    if not candidates:
        return max(step, math.floor(across) * step), max(step, math.floor(down) * step)
    return min(candidates, key=lambda found: abs(found[0] * found[1] - target))


def _asked_area(wanted: Wanted) -> float:
    dataset, (width, height) = wanted.dataset, wanted.size
    if dataset.resolution_type == "area":
        return megapixel_edge(dataset.resolution) ** 2
    area = dataset.resolution * dataset.resolution
    longer = max(width, height) / min(width, height)
    return area * longer if dataset.resolution_type == "pixel" and not wanted.is_square else area


def _cut_to_aspect(wanted: Wanted) -> tuple[float, float]:
    """The image, or the largest part of it that has the aspect ratio a crop asks for."""
    (width, height), crop = wanted.size, wanted.dataset.crop
    if not crop.enabled or crop.aspect == "preserve":
        return width, height
    return min(width, height * wanted.aspect), min(height, width / wanted.aspect)


def _scaled_up(wanted: Wanted, bucket: Size) -> Size:
    (width, height), (wide, high) = wanted.size, bucket
    scale = max(wide / width, high / height)
    return math.ceil(width * scale), math.ceil(height * scale)


# -- rounded_edge ------------------------------------------------------------------------------------------------------


def _rounded_edge(wanted: Wanted) -> Size:
    sides, _ = _edges(wanted, wanted.aspect, wanted.dataset.resolution)
    decimals = wanted.dataset.buckets.aspect_decimals
    if wanted.is_square or round(sides[0] / sides[1], decimals) == 1.0:
        return (nearest_multiple(_square_edge(wanted), wanted.least),) * 2
    return sides


def _square_edge(wanted: Wanted) -> int:
    dataset = wanted.dataset
    if dataset.resolution_type == "pixel":
        return int(dataset.resolution)
    megapixels = _megapixels(dataset.resolution, dataset)
    about = next((edge for size, edge in _SQUARES.items() if abs(megapixels - size) < _ABOUT), None)
    return _to_multiple(math.sqrt(megapixels * 1e6), wanted.multiple) if about is None else about


def _megapixels(resolution: float, dataset: Dataset) -> float:
    return resolution * resolution / 1e6 if dataset.resolution_type == "pixel_area" else resolution


def _to_multiple(value: float, multiple: int) -> int:
    """Halves go to the even multiple."""
    return max(multiple, round(value / multiple) * multiple)


def _edges(wanted: Wanted, aspect: float, resolution: float) -> tuple[Size, Size]:
    """The sides of the bucket, and what the image is scaled to for it."""
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
    own = width / height
    scaled = (sides[0], int(sides[0] / own)) if sides[0] < sides[1] else (int(sides[1] * own), sides[1])
    if scaled[0] < sides[0]:
        more = sides[0] - scaled[0]
        scaled = sides[0], scaled[1] + int(more / own)
    elif scaled[1] < sides[1]:
        more = sides[1] - scaled[1]
        scaled = scaled[0] + int(more * own), sides[1]
    return sides, scaled


def _edges_by_side(wanted: Wanted, aspect: float, shorter: int) -> tuple[Size, Size]:
    width, height = wanted.size
    exact = (shorter, int(shorter / aspect)) if width < height else (int(shorter * aspect), shorter)
    sides = _to_multiple(exact[0], wanted.multiple), _to_multiple(exact[1], wanted.multiple)
    own = width / height
    if own >= 1.0:
        high = max(sides[1], exact[1])
        scaled = int(high * own), high
        return sides, scaled if scaled[0] >= sides[0] else (sides[0], int(sides[0] / own))
    wide = max(sides[0], exact[0])
    scaled = wide, int(wide / own)
    return sides, scaled if scaled[1] >= sides[1] else (int(sides[1] * own), sides[1])


def _scaled_by_edge(wanted: Wanted, bucket: Size) -> Size:
    aspect = 1.0 if wanted.is_square else wanted.aspect
    _, scaled = _edges(wanted, aspect, wanted.dataset.resolution)
    return _covering(scaled, wanted, bucket)


def _covering(scaled: Size, wanted: Wanted, bucket: Size) -> Size:
    """Rounding may leave an image a pixel short of its bucket, and squares of a round edge are larger than the rest."""
    covers = scaled[0] >= bucket[0] and scaled[1] >= bucket[1]
    return scaled if covers else cover(wanted.size, bucket)


def _downsampled_by_edge(wanted: Wanted, target: float) -> Size:
    own = round(wanted.size[0] / wanted.size[1], wanted.dataset.buckets.aspect_decimals)
    return _edges(wanted, own or 10.0**-wanted.dataset.buckets.aspect_decimals, target)[1]


RULES = {
    "nearest": BucketRule(
        lambda wanted: nearest_size(wanted.aspect, wanted.dataset, wanted.multiple),
        lambda wanted, bucket: cover(wanted.size, bucket),
        _scaled_to,
    ),
    "at_most": BucketRule(_at_most, _scaled_up, _scaled_to),
    "rounded_edge": BucketRule(_rounded_edge, _scaled_by_edge, _downsampled_by_edge),
}
