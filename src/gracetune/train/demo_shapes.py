"""The images of `gracetune demo`: one coloured shape on a plain background each, with a caption that describes it.

The base in `demo_base/` was trained on the shapes of `BASE_SHAPES` only. `star` is the concept that the demo teaches.
`recognize` names the shape in a generated image, so the demo can measure whether it was learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIDE = 64
"""Width and height of all images, in pixels."""
BASE_SHAPES = ("circle", "square", "triangle")
CONCEPT = "star"
Color = tuple[int, int, int]
COLORS: Mapping[str, Color] = {
    "red": (214, 40, 40),
    "orange": (247, 140, 20),
    "yellow": (250, 214, 40),
    "green": (46, 160, 67),
    "blue": (38, 84, 200),
    "purple": (128, 52, 168),
    "pink": (250, 150, 190),
    "white": (250, 250, 250),
    "black": (20, 20, 24),
}
_OVERSAMPLING = 4
_MIN_FOREGROUND = 0.02
"""Smallest share of foreground pixels in an image with a shape."""
_MIN_DISTANCE = 70.0
"""RGB distance from the background color above which a pixel is foreground."""
_MIN_OVERLAP = 0.7
"""Smallest intersection over union at which a shape counts as recognized."""
_INNER = 0.48
"""Inner radius of the star, relative to the outer one. A regular star has 0.38, but thin points blur at 64 pixels."""


@dataclass(frozen=True)
class ShapeImage:
    """What is in an image. `x` and `y` are the centre of the shape's circumscribed circle, `radius` its radius."""

    shape: str
    color: str
    background: str
    x: float = SIDE / 2
    y: float = SIDE / 2
    radius: float = SIDE / 3

    @property
    def caption(self) -> str:
        return caption(self.shape, self.color, self.background)

    def draw(self) -> Image.Image:
        points = [[self.x + self.radius * x, self.y + self.radius * y] for x, y in _OUTLINES[self.shape]]
        return _filled("RGB", COLORS[self.background], points, COLORS[self.color])


def caption(shape: str, color: str, background: str) -> str:
    return f"{_article(color)} {color} {shape} on {_article(background)} {background} background"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _corners(count: int, *, rotation: float = 0.0, inner: float = 1.0) -> tuple[tuple[float, float], ...]:
    """Corners on a circle of radius 1, the first one at the top; with `inner`, every other one on a smaller circle."""
    angles = [2 * math.pi * number / count + rotation - math.pi / 2 for number in range(count)]
    radii = [inner if number % 2 else 1.0 for number in range(count)]
    return tuple(
        (radius * math.cos(angle), radius * math.sin(angle)) for angle, radius in zip(angles, radii, strict=True)
    )


_OUTLINES = {
    "circle": _corners(64),
    "square": _corners(4, rotation=math.pi / 4),
    "triangle": _corners(3),
    "star": _corners(10, inner=_INNER),
}


def random_shape(
    generator: np.random.Generator, shapes: Sequence[str], sizes: tuple[float, float] = (0.3, 0.4)
) -> ShapeImage:
    """A shape of random colours near the middle. `sizes`: least and largest radius, relative to the image's side."""
    color, background = generator.choice(list(COLORS), size=2, replace=False)
    radius = generator.uniform(*sizes) * SIDE
    x, y = SIDE * generator.uniform(0.45, 0.55, size=2)
    return ShapeImage(
        str(generator.choice(list(shapes))), str(color), str(background), float(x), float(y), float(radius)
    )


@dataclass(frozen=True)
class RecognizedShape:
    """What is recognized in an image."""

    shape: str | None
    """None if no shape covers the foreground well enough."""
    color: str
    background: str


def recognize(image: Image.Image) -> RecognizedShape:
    """Name the shape in an image, and the nearest colours of `COLORS`.

    The foreground is what differs from the background, whose colour is the median of the image's border. Each shape is
    stretched to the foreground's bounding box and compared with it: intersection over union.
    """
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float64)
    background = np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]), axis=0)
    foreground = np.linalg.norm(pixels - background, axis=-1) > _MIN_DISTANCE
    if foreground.mean() < _MIN_FOREGROUND:
        return RecognizedShape(None, _nearest_color(background), _nearest_color(background))
    found = {shape: _overlap(foreground, shape) for shape in _OUTLINES}
    best = max(found, key=found.__getitem__)
    shape = best if found[best] >= _MIN_OVERLAP else None
    return RecognizedShape(shape, _nearest_color(np.median(pixels[foreground], axis=0)), _nearest_color(background))


def _overlap(foreground: NDArray[np.bool_], shape: str) -> float:
    rows, columns = np.flatnonzero(foreground.any(1)), np.flatnonzero(foreground.any(0))
    corner, end = np.array([columns[0], rows[0]]), np.array([columns[-1], rows[-1]]) + 1
    outline = np.array(_OUTLINES[shape])
    low, high = outline.min(0), outline.max(0)
    points = corner + (outline - low) / (high - low) * (end - corner)
    expected = np.asarray(_filled("L", 0, points.tolist(), 255)) > 127
    return float((foreground & expected).sum() / (foreground | expected).sum())


def _nearest_color(found: NDArray[np.float64]) -> str:
    return min(COLORS, key=lambda name: float(np.linalg.norm(found - np.array(COLORS[name]))))


def _filled(mode: str, background: Color | int, points: list[list[float]], color: Color | int) -> Image.Image:
    """A polygon with smooth edges."""
    large = Image.new(mode, (SIDE * _OVERSAMPLING,) * 2, background)
    ImageDraw.Draw(large).polygon([(_OVERSAMPLING * x, _OVERSAMPLING * y) for x, y in points], fill=color)
    return large.resize((SIDE, SIDE), Image.Resampling.BOX)
