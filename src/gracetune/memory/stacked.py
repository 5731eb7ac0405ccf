"""A tensor of a batch, described by the samples' own tensors: put together where it is needed, never before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

CopyBytes: TypeAlias = Callable[[Sequence[int], Sequence[int], Sequence[int]], None]
"""Copies many stretches of bytes at once: target addresses, source addresses, sizes."""


@dataclass(frozen=True)
class Constant:
    """A sample's part that has no tensor behind it: `value` everywhere."""

    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class Stacked:
    """`pieces` on top of each other along a new first dimension; where one is shorter, `fill` follows it.

    The pieces may lie in pinned host memory or be CUDA views of managed memory; they are only ever read.
    """

    shape: tuple[int, ...]
    """[samples, ...]: no piece is larger than what comes after the first side."""
    dtype: torch.dtype
    pieces: tuple[torch.Tensor | Constant, ...]
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def write(self, target: torch.Tensor, copy_bytes: CopyBytes | None = None) -> torch.Tensor:
        """Into a contiguous tensor of this shape and dtype, on the current stream.

        `copy_bytes`, for a GPU, is quicker than one call of torch's for each piece; it gets those the GPU can read by
        itself. Copies leave reading over the link to the copy engines: one kernel would take cores from the step.
        """
        import torch

        on_cpu = target.device.type == "cpu"
        if on_cpu and (whole := self._whole()):
            return torch.stack(whole, out=target)  # one call is quicker than one for each piece
        if not on_cpu and all(isinstance(piece, Constant) for piece in self.pieces):
            return target.copy_(self.build().pin_memory(), non_blocking=True)  # one copy instead of many small kernels
        own = self.shape[1:]
        if any(piece.shape != own for piece in self.pieces):
            target.fill_(self.fill)
        start, room = target.data_ptr(), math.prod(own) * self.dtype.itemsize
        targets, sources, sizes = [], [], []
        known = range(0)  # addresses in the memory of a piece that may be copied: all of a slab's pieces lie in one
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, Constant):
                _corner(target[number], piece.shape).fill_(piece.value)
                continue
            source, size = piece.data_ptr(), piece.nbytes
            if not size:
                continue
            if copy_bytes is not None and source not in known and (piece.is_cuda or piece.is_pinned()):
                storage = piece.untyped_storage()
                known = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            if source in known and self._is_one_stretch(piece, own):
                targets.append(start + number * room)
                sources.append(source)
                sizes.append(size)
            else:
                _corner(target[number], piece.shape).copy_(piece, non_blocking=True)
        if copy_bytes is not None and targets:
            copy_bytes(targets, sources, sizes)
        return target

    def _whole(self) -> list[torch.Tensor]:
        """The pieces, if all are tensors in main memory that need no filling."""
        own = self.shape[1:]
        whole = [piece for piece in self.pieces if not isinstance(piece, Constant) and piece.shape == own]
        return whole if len(whole) == len(self.pieces) and not any(piece.is_cuda for piece in whole) else []

    def _is_one_stretch(self, piece: torch.Tensor, own: tuple[int, ...]) -> bool:
        """Of bytes, both where it lies and where it goes to."""
        fits = piece.shape == own or piece.shape[1:] == own[1:]
        return fits and piece.dtype == self.dtype and piece.is_contiguous()

    def in_place(self, device: torch.device | None = None) -> torch.Tensor | None:
        """A view of the only piece, where that is all of it and lies on the device; None where it takes a copy."""
        if len(self.pieces) != 1:
            return None
        (piece,) = self.pieces
        if isinstance(piece, Constant) or piece.shape != self.shape[1:] or piece.dtype != self.dtype:
            return None
        there = "cpu" if device is None else device.type
        return piece.unsqueeze(0) if piece.is_contiguous() and piece.device.type == there else None

    def build(self, device: torch.device | None = None) -> torch.Tensor:
        """A new tensor; nothing of it is shared with the pieces, so a step may write into it."""
        import torch

        return self.write(torch.empty(self.shape, dtype=self.dtype, device=device))


def _corner(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return part[tuple(slice(side) for side in shape)]
