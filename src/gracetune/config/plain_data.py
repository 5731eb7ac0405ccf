"""Validates the output of every parser: plain data of the types that JSON has, and within the limits on size.

In YAML a value can contain itself, be repeated a billion times by a few aliases, or be a date, a set or bytes. In JSON
a string can have an unpaired surrogate. In both a number can have ten thousand digits. The rest of gracetune never sees
such values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any

from gracetune.config.draft import Path, describe
from gracetune.config.limits import (
    DEEPEST,
    LONGEST_KEY,
    LONGEST_NUMBER,
    LONGEST_TEXT,
    MOST_ENTRIES,
    MOST_VALUES,
    NotPlainError,
    too_deep,
    too_many_entries,
    too_many_values,
)


@dataclass(frozen=True)
class NonPlainValue:
    """A value that is not plain data. It was replaced by None, or left out if its key is invalid."""

    path: Path
    found: str
    expected: str
    hint: str


def plain(data: Any) -> tuple[Any, list[NonPlainValue]]:
    """Return a deep copy in which invalid values are None, and a list of the invalid values.

    Dates become text (2025-01-01). Raises `NotPlainError` if the structure as a whole is invalid.
    """
    copier = _PlainCopier()
    return copier.copy(data, ()), copier.invalid


@dataclass
class _PlainCopier:
    invalid: list[NonPlainValue] = field(default_factory=list)
    seen: int = 0
    """Number of values copied so far; an alias counts each time it is used."""
    around: list[int] = field(default_factory=list)
    """Ids of the containers that hold the current value, to detect one that contains itself."""

    def copy(self, value: Any, path: Path) -> Any:
        self.seen += 1
        if self.seen > MOST_VALUES:
            raise too_many_values("check that this is the right file; aliases count as often as they are used")
        if isinstance(value, Mapping | list | tuple):
            return self._container(value, path)
        if isinstance(value, date | datetime | time):
            return value.isoformat()
        fault = _fault(value)
        if fault is None:
            return value
        self.invalid.append(NonPlainValue(path, *fault))
        return None

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self.around:
            raise NotPlainError("a value that contains itself", "plain nesting", "write the alias out")
        if len(path) >= DEEPEST:
            raise too_deep()
        self.around.append(id(value))
        if isinstance(value, Mapping):
            copied: Any = self._mapping(value, path)
        else:
            if sum(isinstance(item, Mapping) for item in value) > MOST_ENTRIES:
                raise too_many_entries(len(value))
            copied = [self.copy(item, (*path, index)) for index, item in enumerate(value)]
        self.around.pop()
        return copied

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for key, item in value.items():
            if isinstance(key, int) and (number_fault := _fault(key)) is not None:
                self.invalid.append(NonPlainValue(path, *number_fault))  # Python does not print so many digits
                continue
            # An integer key is unambiguous as text. YAML's values of `yes`, `null` or 1.0 are not what was written.
            name = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
            fault = _key_fault(name) or (_TWICE if name in copied else None)
            if fault is not None:
                self.invalid.append(NonPlainValue((*path, str(name)[:LONGEST_KEY]), *fault))
            else:
                copied[name] = self.copy(item, (*path, name))
        return copied


_TWICE = ("the key twice", "each key once", "keep one of the two")


def _key_fault(key: Any) -> tuple[str, str, str] | None:
    """What is wrong with a key: found, expected, hint; None if nothing is."""
    if not isinstance(key, str):
        return f"a key that is {describe(key)} to YAML", "text as a key", "put the key in quotes"
    if (length := len(json.dumps(key))) > LONGEST_KEY:
        return f"a key of {length} characters (with escapes)", f"at most {LONGEST_KEY}", "shorten it"
    return _fault(key)


def _fault(value: Any) -> tuple[str, str, str] | None:
    """What is wrong with a single value: found, expected, hint; None if nothing is."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"a text of {len(value):,} characters", f"at most {LONGEST_TEXT:,}", "shorten it"
        half = next((character for character in value if "\ud800" <= character <= "\udfff"), None)
        if half is None:
            return None
        return f"half a character (\\u{ord(half):04x})", "text", f"take \\u{ord(half):04x} out, or write both halves"
    if isinstance(value, int):
        if value.bit_length() <= LONGEST_NUMBER:
            return None
        return "a number of hundreds of digits", "a number one could mean", "shorten it"
    if isinstance(value, float):
        if math.isfinite(value):
            return None
        return str(value), "a finite number", "write a finite number, or put it in quotes if it is text"
    kind = {"bytes": "binary data (!!binary)", "set": "a set (!!set)"}.get(type(value).__name__, "no plain value")
    return kind, "text, a number, true or false, a list or a mapping", "write it as text"
