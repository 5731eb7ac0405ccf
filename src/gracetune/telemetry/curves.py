"""Pure functions on curves: smoothing, decimation, axis ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

MOST_POINTS = 600
"""Maximum number of points per curve in plots and in report.json."""
_LARGEST = 1e200
"""Values of this magnitude or more are treated as non-finite: their sums could overflow to infinity."""


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    """Sorted by x. A non-finite y makes a gap."""
    faint: bool = False
    """Drawn in the background, under its smoothed form."""


def finite_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that can be plotted."""
    return tuple(point for point in points if abs(point[1]) < _LARGEST)


def moving_average(points: Sequence[Point], span: float | None = None) -> tuple[Point, ...]:
    """Exponential moving average of the finite points over about `span` points (default: a twentieth of them).

    Non-finite points are left out, so the result has no gaps. The decay is 1 - 2 / (span + 1). As in Adam, dividing by
    the sum of the weights corrects the initial bias.
    """
    known = finite_points(points)
    span = max(1.0, len(known) / 20) if span is None else span
    keep = 1 - 2 / (span + 1)
    averages, total, weight = [], 0.0, 0.0
    for x, y in known:
        total, weight = total * keep + y, weight * keep + 1
        averages.append((x, total / weight))
    return tuple(averages)


def decimate(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most `most` points. Each interval keeps its lowest and its highest point, so no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[index] for index in decimated_indices([y for _, y in points], most))


def decimated_indices(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most `most` values of a curve: the first, the last, and the lowest and highest of each of
    (most - 2) / 2 intervals of equal length. Non-finite values count as 0."""
    if len(values) <= most:
        return [*range(len(values))]
    intervals, inner = (most - 2) // 2, len(values) - 2
    kept = [0]
    for number in range(intervals):
        begin, end = 1 + inner * number // intervals, 1 + inner * (number + 1) // intervals
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


def evenly_spaced_indices(count: int, most: int) -> tuple[int, ...]:
    """At most `most` of the indices 0 to count - 1, evenly spread, including the first and the last."""
    if count <= most:
        return tuple(range(count))
    if most == 1:
        return (count - 1,)
    return tuple(sorted({round(number * (count - 1) / (most - 1)) for number in range(most)}))
