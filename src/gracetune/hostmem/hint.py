"""Memory hints: the result of one (whether the driver applied it, to how many bytes, and why), and its pages.

The driver applies hints to whole pages, so a range may only be hinted on pages of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gracetune.units import KIB


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


HINT_PAGE: Final = max(mmap.PAGESIZE, 64 * KIB)
"""The page size of hints: the 64 KiB in which the GPU maps system memory, or the kernel's page if that is larger."""


@dataclass(frozen=True)
class ByteRange:
    start: int
    bytes: int

    @property
    def end(self) -> int:
        return self.start + self.bytes


def round_up(count: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


def whole_pages(wanted: ByteRange, allocation: ByteRange, page: int = HINT_PAGE) -> ByteRange | None:
    """The pages that a hint for `wanted` may touch, which never hold bytes of a neighbouring tensor.

    The driver rounds a range outwards to whole pages. We first round it inwards, except at the ends of the allocation,
    where there is no neighbour. Returns None if no whole page is left.
    """
    start = allocation.start if wanted.start == allocation.start else round_up(wanted.start, page)
    end = allocation.end if wanted.end == allocation.end else wanted.end // page * page
    return ByteRange(start, end - start) if end > start else None
