"""A first-fit allocator for the address range of one large allocation."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class FreeSpace:
    """The free ranges of a slab. `ranges` holds (address, bytes), sorted, without adjacent or overlapping ranges."""

    start: int
    capacity: int
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranges = [(self.start, self.capacity)]

    def take(self, size: int, alignment: int) -> int | None:
        """Allocate by first fit. Returns the address, or None if no range is large enough."""
        for index, (address, length) in enumerate(self.ranges):
            start = -(-address // alignment) * alignment
            if start + size <= address + length:
                rest = [(address, start - address), (start + size, address + length - start - size)]
                self.ranges[index : index + 1] = [free for free in rest if free[1]]
                return start
        return None

    def give_back(self, address: int, size: int) -> None:
        """Free a range and merge it with adjacent free ranges."""
        insort(self.ranges, (address, size))
        if any(first[0] + first[1] > second[0] for first, second in pairwise(self.ranges)):
            self.ranges.remove((address, size))
            raise ValueError(f"bytes {address}..{address + size} are already free")
        merged: list[tuple[int, int]] = []
        for start, length in self.ranges:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.ranges = merged

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self.ranges)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated."""
        return self.free_bytes == self.capacity
