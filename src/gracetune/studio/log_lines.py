"""Parts of event logs as plain values. A log may be damaged or hostile: nothing here raises for its content."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gracetune.storage.regular_files import open_regular

EVENTS_FILE = "logs/events.jsonl"
MOST_LINE = 4 << 20
"""Longest line that is read. A `RunStarted` holds the whole config, usually a few KiB."""
_MOST_DEPTH = 64
"""Deepest nesting of values that is read. Ours is below ten; beyond about 300, replies could not be written as JSON."""

Fields = dict[str, Any]
"""The fields of one event, as they stand in the log."""


def parse_line(line: bytes) -> Fields | None:
    """The fields of an event; None for a line that is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if line.count(b"[") + line.count(b"{") > _MOST_DEPTH and _is_deeper(value, _MOST_DEPTH):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for one in level if isinstance(one, dict | list)
                 for inner in (one.values() if isinstance(one, dict) else one)]  # fmt: skip
    return bool(level)


def number(value: Any) -> float | None:
    """A finite number, or None. The log writes non-finite ones as strings."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def text(value: Any, most: int = 2000) -> str:
    return value[:most] if isinstance(value, str) else ""


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a mapping."""
    return {str(name): found for name, one in mapping(value).items() if (found := number(one)) is not None}


def open_log(run: Path) -> int:
    """The open log of a run. Raises OSError where there is none, or where it is not a regular file."""
    return open_regular(run / EVENTS_FILE)


def read_lines(descriptor: int, begin: int, end: int) -> Iterator[bytes]:
    """The complete lines of a part of the log. A first line that begins before `begin` is left out."""
    data = os.pread(descriptor, end - begin, begin)
    lines = data.split(b"\n")
    lines.pop()  # incomplete, or empty
    if begin and lines and os.pread(descriptor, 1, begin - 1) != b"\n":
        del lines[0]
    yield from lines
