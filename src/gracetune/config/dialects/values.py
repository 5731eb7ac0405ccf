"""Converts values as the peers write them: numbers and switches as text, lists with commas, alternative names.

A converter (`Converter`) returns a value that it cannot convert unchanged, so that the schema reports it. The other
functions test values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from gracetune.config.plain_data import plain

Converter = Callable[[Any], Any]

_TRUE = ("1", "true", "yes", "y", "on")
_FALSE = ("0", "false", "no", "n", "off")


def name_set(text: str) -> frozenset[str]:
    """Return the set of names in a text, separated by white space."""
    return frozenset(text.split())


def as_given(value: Any) -> Any:
    return value


def as_flag(value: Any) -> Any:
    """Convert to a boolean as a command line does. Anything else is returned unchanged."""
    if isinstance(value, str):
        text = value.strip().lower()
        return True if text in _TRUE else False if text in _FALSE else value
    return value != 0 if isinstance(value, int | float) and value in (0, 1) else value


def inverse(value: Any) -> Any:
    """Convert to a boolean and negate it."""
    flag = as_flag(value)
    return not flag if isinstance(flag, bool) else value


def as_number(value: Any) -> Any:
    """Convert text such as `"4"` and `"1e-4"` to a number. Text that is not a finite number is returned unchanged."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            number = convert(value)
            return number if math.isfinite(number) else value
        except (ValueError, OverflowError):
            continue
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(value: Any) -> int | None:
    """Return the value if it is an integer, else None. A boolean is not an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real(value: Any) -> float | None:
    """Return the value as a finite float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def positive_or_none(value: Any) -> Any:
    """Convert to a number, or to None for 0 or less, which the peers use for "off"."""
    number = as_number(value)
    return None if is_number(number) and number <= 0 else number


def as_text(value: Any) -> Any:
    """Convert a number to text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def as_list(value: Any) -> Any:
    """Convert a JSON list, or text with commas, to a list."""
    value = from_json(value)
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def from_json(value: Any) -> Any:
    """Parse a string that has JSON, as options for structured values allow."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            parsed, invalid = plain(json.loads(value))
        except (ValueError, RecursionError):
            return value
        return value if invalid else parsed
    return value


def choice(table: Mapping[str, str]) -> Converter:
    """Return a converter that translates names with a table. Other names are returned unchanged."""
    return lambda value: table.get(value.strip().lower(), value) if isinstance(value, str) else value


def precision(value: Any) -> Any:
    """Convert the long name of a number format, such as `bfloat16`, to ours."""
    table = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    return table.get(value, value) if isinstance(value, str) else value


def is_off(value: Any, default: Any = None) -> bool:
    """Whether an option has its default, or one of the usual values for "off"."""
    if value is None or value in ("", "None") or _same(value, default):
        return True
    return not default and (as_flag(value) is False or (isinstance(value, str) and value.strip().lower() == "none"))


def _same(value: Any, default: Any) -> bool:
    found = as_number(value) if is_number(default) else as_flag(value) if isinstance(default, bool) else value
    return isinstance(found, type(default) if not is_number(default) else int | float) and bool(found == default)
