"""Plots as inline SVG in the page's colours. Each has a table of the same numbers, for readers who cannot see it."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gracetune.telemetry import number_format
from gracetune.telemetry.curves import Point, Series, decimate, evenly_spaced_indices, finite_points, ticks

WIDTH, HEIGHT = 380, 220
"""In the units of `TEXT_SIZE`. A phone shows a plot at about this width, so its text stays readable there."""
TEXT_SIZE = 13
LEFT, RIGHT, TOP, BOTTOM = 74, 22, 12, 42
COLOURS = 6
TABLE_ROWS = 200
_MOST_MARKERS = 40


@dataclass(frozen=True)
class Plot:
    title: str
    series: tuple[Series, ...]
    unit: Callable[[float], str] = number_format.number
    """Formats a y value."""
    base: int = 1000
    """Base of the unit's prefixes. It decides which tick values look round: with 1024, whole MiB and GiB."""
    stacked: bool = False
    markers: tuple[tuple[float, str], ...] = ()
    """Step and label of events to mark."""
    stairs: bool = False
    """Draw a step function: each value holds until the next one."""
    note: str = ""


@dataclass(frozen=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def figure(plot: Plot, number: int) -> str:
    """The plot, its key and its table, as HTML. `number` makes the element ids unique on the page."""
    plotted = [series for series in plot.series if finite_points(series.points)]
    if not plotted:
        return ""
    stacked = _stacked(plotted) if plot.stacked else [(series.points, ()) for series in plotted]
    frame, above = _frame(plot, [points for points, _ in stacked])
    curves: list[str] = []
    for index, (series, (upper, lower)) in enumerate(zip(plotted, stacked, strict=True)):
        curves += _curve(_Curve(series, upper, lower, _colour(plotted, index), plot.stairs), frame)
    inside = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    image = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_escape(_description(plot, plotted))}">'
        f'<defs><clipPath id="clip{number}"><rect {inside}/></clipPath></defs>'
        f"{''.join((*_axes(plot, frame), *_markers(plot, frame)))}"
        f'<g clip-path="url(#clip{number})">{"".join(curves)}</g></svg>'
    )
    notes = " ".join(note for note in (plot.note, above) if note)
    note_html = f'<p class="note">{_escape(notes)}</p>' if notes else ""
    title = f"<figcaption>{_escape(plot.title)}</figcaption>"
    return f'<figure class="plot">{title}{_key(plotted)}{image}{note_html}{_table(plot, plotted)}</figure>'


# -- coordinates ------------------------------------------------------------------------------------------------------


def _frame(plot: Plot, curves: Sequence[Sequence[Point]]) -> tuple[_Frame, str]:
    """The ranges of both axes, and a sentence about values above the plot."""
    points = [point for curve in curves for point in finite_points(curve)]
    xs, ys = [x for x, _ in points], sorted(y for _, y in points)
    low, high, above = min(0.0, ys[0]) if plot.stacked else ys[0], ys[-1], ""
    usual = ys[int(0.95 * (len(ys) - 1))]
    if not plot.stacked and len(ys) >= 40 and usual > 0 and high > 4 * usual:
        # One spike would flatten the rest of the curve, so the axis ends at twice the 95th percentile.
        beyond = sum(y > 2 * usual for y in ys)
        above = f"{beyond} values lie above the plot, the highest is {plot.unit(high)}."
        high = 2 * usual
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    x0, x1 = min(xs), max(xs)
    if x1 == x0:  # one step, in the middle; from 2**53 on, adding 0.5 to a float has no effect
        x0, x1 = min(x0 - 0.5, math.nextafter(x0, -math.inf)), max(x0 + 0.5, math.nextafter(x0, math.inf))
    return _Frame(x0, x1, low if plot.stacked else low - margin, high + margin), above


def _stacked(series: Sequence[Series]) -> list[tuple[tuple[Point, ...], tuple[Point, ...]]]:
    """The upper and the lower edge of each series in a stacked plot. A missing value counts as 0."""
    xs = sorted({x for one in series for x, _ in one.points})
    floor = dict.fromkeys(xs, 0.0)
    edges = []
    for one in series:
        known = dict(finite_points(one.points))
        lower = tuple(floor.items())
        floor = {x: floor[x] + known.get(x, 0.0) for x in xs}
        edges.append((tuple(floor.items()), lower))
    return edges


# -- drawing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    series: Series
    upper: tuple[Point, ...]
    lower: tuple[Point, ...]
    colour: int
    stairs: bool


def _curve(curve: _Curve, frame: _Frame) -> list[str]:
    css = f"c{curve.colour}" + (" faint" if curve.series.faint else "")
    if len(curve.upper) == 1:
        return _points(curve.upper, css, frame)
    if curve.lower:
        edge = [*decimate(curve.upper), *reversed(decimate(curve.lower))]
        return [f'<path class="area {css}" d="{_path(edge, frame)}Z"/>']
    parts = []
    for finite_run, group in itertools.groupby(decimate(curve.upper), key=lambda point: bool(finite_points([point]))):
        points = [*group]
        if not finite_run:
            continue
        if len(points) == 1:
            parts += _points(points, css, frame)
            continue
        parts.append(f'<path class="line {css}" d="{_path(_as_stairs(points) if curve.stairs else points, frame)}"/>')
    return parts


def _points(points: Sequence[Point], css: str, frame: _Frame) -> list[str]:
    return [
        f'<circle class="{css}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>' for x, y in finite_points(points)
    ]


def _as_stairs(points: Sequence[Point]) -> list[Point]:
    corners = [points[0]]
    for (_, before), (x, y) in itertools.pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


def _path(points: Sequence[Point], frame: _Frame) -> str:
    top = -HEIGHT  # a spike is clipped anyway, so its coordinate can stay small
    return "M" + "L".join(f"{frame.x(x):.1f} {max(top, frame.y(y)):.1f}" for x, y in points)


def _axes(plot: Plot, frame: _Frame) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    scale = _scale(max(abs(frame.y0), abs(frame.y1)), plot.base)
    for value in (round_one * scale for round_one in ticks(frame.y0 / scale, frame.y1 / scale)):
        y = f"{frame.y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y}" dy="0.32em">{_escape(plot.unit(value))}</text>')
    for value in ticks(frame.x0, frame.x1, 4):
        if value != int(value):
            continue
        x = f"{frame.x(value):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick middle" x="{x}" y="{bottom + 18}">{int(value):,}</text>')
    parts.append(f'<text class="tick end" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">step</text>')
    return parts


def _scale(largest: float, base: int) -> float:
    scale = 1.0
    while base != 1000 and largest / scale >= base:
        scale *= base
    return scale


def _markers(plot: Plot, frame: _Frame) -> list[str]:
    inside = [(x, label) for x, label in plot.markers if frame.x0 <= x <= frame.x1]
    if len(inside) > _MOST_MARKERS:
        return []  # too many lines to be readable; the page's table of transitions lists all of them
    return [
        f'<line class="marker" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
        f"<title>{_escape(f'step {x:,.0f}: {label}')}</title></line>"
        for x, label in inside
    ]


def _colour(series: Sequence[Series], index: int) -> int:
    """The colour of a curve. A faint curve precedes its smoothed form and has the same colour."""
    return sum(not one.faint for one in series[:index]) % COLOURS


# -- text alternatives ------------------------------------------------------------------------------------------------


def _key(series: Sequence[Series]) -> str:
    named = [(index, one) for index, one in enumerate(series) if not one.faint]
    if len(named) < 2:
        return ""
    entries = "".join(f'<li class="c{_colour(series, index)}">{_escape(one.name)}</li>' for index, one in named)
    return f'<ul class="key">{entries}</ul>'


def _description(plot: Plot, series: Sequence[Series]) -> str:
    sentences = []
    for one in series:
        known = finite_points(one.points)
        low, high = (choose(y for _, y in known) for choose in (min, max))
        sentences.append(
            f"{one.name}: from {plot.unit(known[0][1])} to {plot.unit(known[-1][1])}, "
            f"lowest {plot.unit(low)}, highest {plot.unit(high)}"
        )
    return f"{plot.title} by step. " + "; ".join(sentences)


def _table(plot: Plot, series: Sequence[Series]) -> str:
    xs = sorted({x for one in series for x, _ in one.points})
    shown = [xs[index] for index in evenly_spaced_indices(len(xs), TABLE_ROWS)]
    columns = [dict(one.points) for one in series]
    head = "".join(f'<th scope="col">{_escape(one.name)}</th>' for one in series)
    rows = "".join(
        f'<tr><th scope="row">{x:,.0f}</th>'
        + "".join(f"<td>{_escape(plot.unit(column[x])) if x in column else ''}</td>" for column in columns)
        + "</tr>"
        for x in shown
    )
    left_out = "" if len(shown) == len(xs) else f" ({len(shown)} of {len(xs):,} steps; all are in logs/events.jsonl)"
    return (
        f'<details><summary>Numbers{left_out}</summary><div class="scroll"><table><caption>{_escape(plot.title)}'
        f'</caption><thead><tr><th scope="col">step</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</details>"
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
