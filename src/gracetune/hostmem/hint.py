"""What became of a request to place or move memory: done or not, how many bytes, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hint:
    """Truthy when the driver took it. A hint that could not be given says why; it never just vanishes."""

    applied: bool
    bytes: int
    reason: str

    def __bool__(self) -> bool:
        return self.applied


def not_applied(reason: str) -> Hint:
    return Hint(applied=False, bytes=0, reason=reason)


def together(hints: Iterable[Hint]) -> Hint:
    """Several hints as one: applied if any was, with every distinct reason once."""
    given = list(hints)
    if not given:
        return not_applied("nothing to hint")
    reasons = "; ".join(dict.fromkeys(hint.reason for hint in given))
    return Hint(any(given), sum(hint.bytes for hint in given), reasons)


def both(first: Hint, second: Hint) -> Hint:
    """Two hints about the same bytes."""
    return Hint(first.applied or second.applied, max(first.bytes, second.bytes), f"{first.reason}; {second.reason}")
