"""Numbers formatted for people.

`gracetune.units` does the same for the rest of the package. Telemetry may not import it: see the layers in
docs/architecture.md.
"""

from __future__ import annotations

import math

UNKNOWN = "unknown"


def number(value: float) -> str:
    """Four significant figures: `0.1234`, `12.3`, `1.2e-05`, `nan`. Integers get thousands separators."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def size(count: float) -> str:
    """Binary units with three significant figures: `93.1 GiB`."""
    if not math.isfinite(count):
        return UNKNOWN
    sign, left = ("-" if count < 0 else ""), abs(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if left < 1023.5:
            return f"{sign}{int(left) if unit == 'B' else _three(left)} {unit}"
        left /= 1024
    return f"{sign}{_three(left)} TiB"


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """`2d 03h`, `3h 07m`, `12m 30s`, `4.2 s`, `87 ms`."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def pace(seconds: float | None) -> str:
    """Seconds per step: `1.52 s/it`, `48 ms/it`."""
    if seconds is None or not math.isfinite(seconds):
        return "measuring"
    return f"{seconds * 1000:.0f} ms/it" if seconds < 0.9995 else f"{seconds:.2f} s/it"
