"""Pure functions on curves: smoothing, thinning, axis ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

MOST_POINTS = 600
"""Maximum number of points per curve in plots and in report.json."""
_LARGEST = 1e200
"""Values beyond it are treated as non-finite: sums and differences of larger ones could overflow to infinity."""


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    """Sorted by x. A non-finite y makes a gap."""
    faint: bool = False
    """Drawn in the background, under its smoothed form."""


def finite(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that can be plotted."""
    return tuple(point for point in points if abs(point[1]) < _LARGEST)


def smoothed(points: Sequence[Point], span: float | None = None) -> tuple[Point, ...]:
    """Exponential moving average over about `span` points (default: a twentieth of all), corrected for initial bias.

    The decay is 1 - 2 / (span + 1). Dividing by the sum of the weights corrects the bias, as in Adam.
    """
    known = finite(points)
    span = max(1.0, len(known) / 20) if span is None else span
    keep = 1 - 2 / (span + 1)
    averages, total, weight = [], 0.0, 0.0
    for x, y in known:
        total, weight = total * keep + y, weight * keep + 1
        averages.append((x, total / weight))
    return tuple(averages)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most `most` points. Each stretch keeps its lowest and its highest point, so no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[index] for index in kept_indices([y for _, y in points], most))


def kept_indices(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most `most` values of a curve: the first, the last, and the lowest and highest of each of
    (most - 2) / 2 stretches of equal length. Non-finite values count as 0."""
    if len(values) <= most:
        return [*range(len(values))]
    stretches, inner = (most - 2) // 2, len(values) - 2
    kept = [0]
    for number in range(stretches):
        begin, end = 1 + inner * number // stretches, 1 + inner * (number + 1) // stretches
        part = [value if abs(value) < _LARGEST else 0.0 for value in values[begin:end]]
        ends = {part.index(min(part)), part.index(max(part))} if part else set()
        kept += [begin + index for index in sorted(ends)]
    return [*kept, len(values) - 1]


def ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Round numbers in [low, high]: about `about` of them, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / about
    if not raw > 1e-200:  # also NaN
        return (low,)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1))


def evenly(count: int, most: int) -> tuple[int, ...]:
    """At most `most` of the indices 0 to count - 1, evenly spread, including the first and the last."""
    if count <= most:
        return tuple(range(count))
    if most == 1:
        return (count - 1,)
    return tuple(sorted({round(number * (count - 1) / (most - 1)) for number in range(most)}))
