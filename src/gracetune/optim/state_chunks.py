"""Trained parameters in chunks of bounded size, with one fp32 gradient sum and one packed state each.

A chunk takes consecutive parameters of one param group and one dtype. A parameter that does not fit is split, which
elementwise optimizers allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from gracetune.optim.state_precision import StateLayout
from gracetune.optim.state_sizes import CHUNK

_ALIGNMENT: Final = 64
"""Elements. Each part of a chunk begins at a multiple of this."""

HomeName = Literal["resident", "streamed"]


@dataclass(frozen=True, eq=False)
class ChunkPart:
    """A parameter's elements from `start` to `stop`, which are at `offset` in the chunk."""

    name: str
    parameter: Tensor
    start: int
    stop: int
    offset: int

    @property
    def weight(self) -> Tensor:
        """The elements themselves: a view of the parameter."""
        return self.parameter.detach().view(-1)[self.start : self.stop]

    def of(self, flat: Tensor) -> Tensor:
        """The part's part of one of the chunk's tensors."""
        return flat[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True, eq=False)
class Chunk:
    number: int
    """Among all chunks of the optimizer."""
    group: int
    """The param group."""
    parts: tuple[ChunkPart, ...]
    elements: int
    layout: StateLayout
    home: HomeName

    @property
    def size(self) -> int:
        """Bytes of the packed state."""
        return self.layout.size(self.elements)

    def weights(self) -> list[tuple[Tensor, int]]:
        """The weights as views, each with its offset."""
        return [(part.weight, part.offset) for part in self.parts]


def chunks_of(
    groups: Sequence[Mapping[str, Tensor]], layout: StateLayout, *, resident_bytes: int, limit: int = CHUNK
) -> list[Chunk]:
    """All chunks, in the order of the groups and their parameters.

    States become resident in that order while `resident_bytes` suffice: the first blocks of a forward pass are needed
    first.
    """
    chunks: list[Chunk] = []
    for number, group in enumerate(groups):
        for dtype in dict.fromkeys(parameter.dtype for parameter in group.values()):
            members = {name: one for name, one in group.items() if one.dtype == dtype}
            fitting = layout if dtype == torch.bfloat16 else layout.with_master
            for parts in _filled(members, limit):
                last = parts[-1]
                elements = last.offset + last.stop - last.start
                home: HomeName = "resident" if fitting.size(elements) <= resident_bytes else "streamed"
                resident_bytes -= fitting.size(elements)
                chunks.append(Chunk(len(chunks), number, tuple(parts), elements, fitting, home))
    return chunks


def _filled(parameters: Mapping[str, Tensor], limit: int) -> Iterable[list[ChunkPart]]:
    parts: list[ChunkPart] = []
    offset = 0
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise ValueError(f"{name} is not contiguous, so its elements cannot be taken in order")
        start = 0
        while start < parameter.numel():
            if offset >= limit:
                yield parts
                parts, offset = [], 0
            stop = min(parameter.numel(), start + limit - offset)
            parts.append(ChunkPart(name, parameter, start, stop, offset))
            offset = -(-(offset + stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    if parts:
        yield parts


class GradientSums:
    """fp32 gradient sums of one param group, one tensor for each chunk, and the factor they are multiplied by.

    Padding between parts stays 0.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple(chunks)
        first = chunks[0].parts[0].parameter
        self.sums = [torch.zeros(chunk.elements, dtype=torch.float32, device=first.device) for chunk in chunks]
        self._places: dict[int, list[tuple[Tensor, int, int]]] = {}
        for chunk, flat in zip(self.chunks, self.sums, strict=True):
            for part in chunk.parts:
                places = self._places.setdefault(id(part.parameter), [])
                places.append((part.of(flat), part.start, part.stop))
        self.divisor = torch.ones((), device=first.device)
        """[]: the update divides gradients by this (`grad_scale` of torch's fused optimizers)."""
        self.filled = False
        """Whether gradients were added since the sums were last 0."""

    @property
    def parameters(self) -> list[Tensor]:
        return list({id(part.parameter): part.parameter for one in self.chunks for part in one.parts}.values())

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        self.filled = True
        flat = gradient.reshape(-1)
        for place, start, stop in self._places[id(parameter)]:
            place.add_(flat[start:stop])

    def clear(self) -> None:
        if self.filled:
            torch._foreach_zero_(self.sums)
            self.filled = False
