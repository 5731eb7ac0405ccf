"""The result of a memory hint: whether the driver applied it, to how many bytes, and why or why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hint:
    """Truthy if the driver applied the hint. `reason` always says why or why not, so that no hint fails silently."""

    applied: bool
    bytes: int
    reason: str

    def __bool__(self) -> bool:
        return self.applied


def not_applied(reason: str) -> Hint:
    return Hint(applied=False, bytes=0, reason=reason)


def together(hints: Iterable[Hint]) -> Hint:
    """Combine hints about different bytes: applied if any was, with each distinct reason once."""
    results = list(hints)
    if not results:
        return not_applied("nothing to hint")
    reasons = "; ".join(dict.fromkeys(hint.reason for hint in results))
    return Hint(any(results), sum(hint.bytes for hint in results), reasons)


def both(first: Hint, second: Hint) -> Hint:
    """Combine two hints about the same bytes, which count once."""
    return Hint(first.applied or second.applied, max(first.bytes, second.bytes), f"{first.reason}; {second.reason}")
