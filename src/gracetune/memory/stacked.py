"""A batch tensor described by the tensors of its samples. It is assembled on the device that needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

CopyBytes: TypeAlias = Callable[[Sequence[int], Sequence[int], Sequence[int]], None]
"""Enqueues many copies at once: target addresses, source addresses, sizes in bytes."""


@dataclass(frozen=True)
class Constant:
    """Stands in for the tensor of a sample that has none; all of its elements are `value`."""

    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class Stacked:
    """`parts` stacked along a new first dimension; shorter ones are padded with `fill`.

    The parts may be in pinned host memory or be CUDA views of managed memory. They are never written.
    """

    shape: tuple[int, ...]
    """[samples, ...]. No dimension of a part exceeds the corresponding one after the first."""
    dtype: torch.dtype
    parts: tuple[torch.Tensor | Constant, ...]
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def write(self, target: torch.Tensor, copy_bytes: CopyBytes | None = None) -> torch.Tensor:
        """Assemble into `target`, a contiguous tensor of this shape and dtype, on the current stream.

        On a GPU, `copy_bytes` is faster than one torch call per part. It is used for parts that the GPU can read
        directly. Copies run on the copy engines, while a gather kernel would take GPU cores from the step.
        """
        import torch

        on_cpu = target.device.type == "cpu"
        if on_cpu and (whole := self._unpadded()):
            return torch.stack(whole, out=target)  # one call is faster than one per part
        if not on_cpu and all(isinstance(part, Constant) for part in self.parts):
            return target.copy_(self.build().pin_memory(), non_blocking=True)  # one copy instead of many small kernels
        sample_shape = self.shape[1:]
        if any(part.shape != sample_shape for part in self.parts):
            target.fill_(self.fill)
        start, sample_bytes = target.data_ptr(), math.prod(sample_shape) * self.dtype.itemsize
        targets, sources, sizes = [], [], []
        # Address range of the last storage that the GPU can read. The parts of one slab share a storage, and asking
        # `is_pinned` for each of them would be slow.
        readable = range(0)
        for number, part in enumerate(self.parts):
            if isinstance(part, Constant):
                _corner(target[number], part.shape).fill_(part.value)
                continue
            source, size = part.data_ptr(), part.nbytes
            if not size:
                continue
            if copy_bytes is not None and source not in readable and (part.is_cuda or part.is_pinned()):
                storage = part.untyped_storage()
                readable = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            if source in readable and self._is_one_range(part, sample_shape):
                targets.append(start + number * sample_bytes)
                sources.append(source)
                sizes.append(size)
            else:
                _corner(target[number], part.shape).copy_(part, non_blocking=True)
        if copy_bytes is not None and targets:
            copy_bytes(targets, sources, sizes)
        return target

    def _unpadded(self) -> list[torch.Tensor]:
        """The parts if all are tensors in main memory without padding, else an empty list."""
        sample_shape = self.shape[1:]
        whole = [part for part in self.parts if not isinstance(part, Constant) and part.shape == sample_shape]
        return whole if len(whole) == len(self.parts) and not any(part.is_cuda for part in whole) else []

    def _is_one_range(self, part: torch.Tensor, sample_shape: tuple[int, ...]) -> bool:
        """Whether the part is one contiguous range of bytes, both at its source and in the target."""
        fits = part.shape == sample_shape or part.shape[1:] == sample_shape[1:]
        return fits and part.dtype == self.dtype and part.is_contiguous()

    def in_place(self, device: torch.device | None = None) -> torch.Tensor | None:
        """A view of the only part if that is the complete tensor on this device; None if a copy is needed."""
        if len(self.parts) != 1:
            return None
        (part,) = self.parts
        if isinstance(part, Constant) or part.shape != self.shape[1:] or part.dtype != self.dtype:
            return None
        wanted = "cpu" if device is None else device.type
        return part.unsqueeze(0) if part.is_contiguous() and part.device.type == wanted else None

    def build(self, device: torch.device | None = None) -> torch.Tensor:
        """Assemble into a new tensor. It shares no memory with the parts, so a step may write into it."""
        import torch

        return self.write(torch.empty(self.shape, dtype=self.dtype, device=device))


def _corner(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return part[tuple(slice(length) for length in shape)]
