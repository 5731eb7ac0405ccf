"""Room inside one large allocation, handed out and taken back."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class FreeSpace:
    """The free ranges of a slab as (address, bytes), sorted, never adjacent, never overlapping."""

    start: int
    capacity: int
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranges = [(self.start, self.capacity)]

    def take(self, size: int, alignment: int) -> int | None:
        """An address, by first fit; None if no range is large enough."""
        for index, (address, length) in enumerate(self.ranges):
            start = -(-address // alignment) * alignment
            if start + size <= address + length:
                rest = [(address, start - address), (start + size, address + length - start - size)]
                self.ranges[index : index + 1] = [piece for piece in rest if piece[1]]
                return start
        return None

    def give_back(self, address: int, size: int) -> None:
        insort(self.ranges, (address, size))
        if any(first[0] + first[1] > second[0] for first, second in pairwise(self.ranges)):
            self.ranges.remove((address, size))
            raise ValueError(f"bytes {address}..{address + size} are free already")
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
        """Nothing is handed out."""
        return self.free_bytes == self.capacity
