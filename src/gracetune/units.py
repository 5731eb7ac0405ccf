"""Parsing and formatting of byte counts and durations."""

from __future__ import annotations

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kb": 10**3, "kib": KIB,
    "m": MIB, "mb": 10**6, "mib": MIB,
    "g": GIB, "gb": 10**9, "gib": GIB,
    "t": TIB, "tb": 10**12, "tib": TIB,
}  # fmt: skip
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Parse `"80 GiB"`, `"1.5g"` or `"4096"` to bytes. Single letters are binary, `GB` is decimal, as in `dd`."""
    match = _BYTES.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"not a size in bytes: {text!r}; write for example 512MiB, 80GiB or 4096")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(count: int) -> str:
    """Format with binary units and three significant figures: `93.1 GiB`."""
    sign, size = ("-" if count < 0 else ""), float(abs(count))
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.5 would print as "1024": switch to the next unit as soon as the *printed* number would reach it.
        if size < 1023.5:
            return f"{sign}{_three_figures(size) if unit != 'B' else int(size)} {unit}"
        size /= 1024
    return f"{sign}{_three_figures(size)} TiB"


def _three_figures(value: float) -> str:
    """The limits are those of the printed value: 9.995 would print as "10.00"."""
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Format as `3h 07m`, `12m 30s`, `4.2 s` or `87 ms`. Negative and non-finite values give `unknown`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "unknown"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"
