"""Canny's edge detection, as in the package with which SimpleTuner makes its reference images.

The image is converted to grey and blurred by a Gaussian of 1.4 pixels. The gradient is Sobel's, and its strength is its
length (OpenCV adds the two parts by default, and does not blur). A pixel is an edge if its strength is the largest
across the edge and is at least `high`, or at least `low` and connected to such a pixel. Pixels on the border are never
edges. The result is equal bit for bit to one recorded from that package (`tests/unit/fidelity/test_edges.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from gracetune.data.refs import Canny

_GREY = np.array([0.299, 0.587, 0.114], np.float32)
_BLUR = np.array([0.028995262, 0.10381836, 0.22317336, 0.28802603, 0.22317336, 0.10381836, 0.028995262], np.float32)
"""A Gaussian of 1.4 pixels. Written out, because the last digit decides: sums are cut off to whole numbers."""
BAND = 256
"""Rows that are processed at once. The whole of a large scan would take fifty bytes for each pixel."""
_AROUND = 5
"""Rows above and below on which a row's result depends: 3 of the blur, 1 of the gradient, 1 of the comparison."""
_TANGENT = np.sqrt(2) - 1
"""Of 22.5 degrees."""
_FOLLOWED = ((0, 1), (1, 1), (1, 0), (-1, -1), (0, -1), (1, -1))
"""Offsets (dy, dx) from an edge to the weaker pixels that continue it. Straight up and up to the right are missing, as
in that package."""

Grey = np.ndarray[Any, np.dtype[np.uint8]]
Whole = np.ndarray[Any, np.dtype[np.int32]]
Marked = np.ndarray[Any, np.dtype[np.bool_]]


def canny_edges(image: Image.Image, thresholds: Canny) -> Image.Image:
    """White edges on black, in RGB and of the image's size."""
    pixels = np.asarray(image.convert("RGB"))
    weak, strong = np.zeros(pixels.shape[:2], np.bool_), np.zeros(pixels.shape[:2], np.bool_)
    for top in range(0, len(pixels), BAND):
        above = min(top, _AROUND)
        grey = _grey(pixels[top - above : top + BAND + _AROUND])
        strength = _thinned(_blurred(grey))[above : above + BAND]
        weak[top : top + BAND] = strength >= thresholds.low**2
        strong[top : top + BAND] = strength >= thresholds.high**2
    return Image.fromarray(_connected(weak, strong).astype(np.uint8) * 255).convert("RGB")


def _grey(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Grey:
    """Cut off to whole numbers, not rounded."""
    red, green, blue = np.moveaxis(pixels.astype(np.float32), 2, 0)
    grey: Grey = ((_GREY[0] * red + _GREY[1] * green) + _GREY[2] * blue).astype(np.uint8)
    return grey


def _blurred(grey: Grey) -> Grey:
    return _along_rows(_along_rows(grey).T).T


def _along_rows(grey: Grey) -> Grey:
    width, beyond = grey.shape[1], len(_BLUR) // 2
    wide = np.pad(grey, ((0, 0), (beyond, beyond)), "edge").astype(np.float32)
    total = np.zeros(grey.shape, np.float32)
    for place, weight in enumerate(_BLUR):
        total += wide[:, place : place + width] * weight
    return total.astype(np.uint8)


def _thinned(grey: Grey) -> Whole:
    """The squared strength of the gradient where it is the largest across the edge, else 0; whole numbers, so that
    comparisons are exact."""
    height, width = grey.shape
    strength = np.zeros((height, width), np.int32)
    if height < 3 or width < 3:
        return strength
    wide = np.pad(grey, 1, "edge").astype(np.int32)
    left, right = _smoothed(wide[:, :-2].T).T, _smoothed(wide[:, 2:].T).T
    above, below = _smoothed(wide[:-2]), _smoothed(wide[2:])
    across, down = right - left, below - above
    whole = across**2 + down**2

    def beside(dy: int, dx: int) -> Whole:
        return whole[1 + dy : height - 1 + dy, 1 + dx : width - 1 + dx]

    inner = (slice(1, -1), slice(1, -1))
    level, steep = np.abs(across[inner]), np.abs(down[inner])
    directions = [steep < _TANGENT * level, level < _TANGENT * steep, (across * down)[inner] > 0]
    before = np.select(directions, [beside(0, -1), beside(-1, 0), beside(-1, -1)], beside(-1, 1))
    after = np.select(directions, [beside(0, 1), beside(1, 0), beside(1, 1)], beside(1, -1))
    own = beside(0, 0)
    strength[inner] = np.where((own < before) | (own < after), 0, own)
    return strength


def _smoothed(rows: Whole) -> Whole:
    """1, 2, 1 along the rows."""
    found: Whole = rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]
    return found


def _connected(weak: Marked, strong: Marked) -> Marked:
    """The strong pixels, and all weak ones that are reached from them by steps of `_FOLLOWED` over weak ones."""
    width = weak.shape[1]
    steps = np.array([dy * width + dx for dy, dx in _FOLLOWED])
    candidates, reached = weak.ravel(), strong.ravel().copy()
    latest = np.flatnonzero(reached)
    while latest.size:  # no weak pixel is on the border, so no step leaves the image
        around = (latest[:, None] + steps).ravel()
        latest = np.unique(around[candidates[around] & ~reached[around]])
        reached[latest] = True
    return reached.reshape(weak.shape)
