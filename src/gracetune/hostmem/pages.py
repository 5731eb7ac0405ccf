"""Byte ranges and pages. Hints live on whole pages, so who shares a page with whom decides what may be hinted."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final

from gracetune.units import KIB

HINT_PAGE: Final = max(mmap.PAGESIZE, 64 * KIB)
"""What the GPU maps system memory in, or the kernel's page where that is larger."""


@dataclass(frozen=True)
class ByteRange:
    start: int
    bytes: int

    @property
    def end(self) -> int:
        return self.start + self.bytes


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def whole_pages(wanted: ByteRange, allocation: ByteRange, page: int = HINT_PAGE) -> ByteRange | None:
    """The pages a hint for `wanted` may touch: never one that also holds a neighbour's bytes.

    The driver rounds a range outwards. We round it inwards first, except at the allocation's own ends, where there is
    no neighbour. None if no whole page is left.
    """
    start = allocation.start if wanted.start == allocation.start else round_up(wanted.start, page)
    end = allocation.end if wanted.end == allocation.end else wanted.end // page * page
    return ByteRange(start, end - start) if end > start else None
