"""Byte ranges and pages. The driver applies hints to whole pages, so a range may only be hinted on pages of its own."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final

from gracetune.units import KIB

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
