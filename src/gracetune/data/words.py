"""Counts and lists as people say them."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`; of two words the last is the one that changes."""
    many = f"{noun}es" if noun.endswith(("ch", "x")) else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first few of a list."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
