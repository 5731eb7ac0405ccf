"""Reusable buffers for reading a file into tensors that it cannot be read into directly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor


class TransferBuffers(Protocol):
    """A pool of buffers. Thread-safe; each call borrows one buffer."""

    def copy_through(
        self, fill: Callable[[Tensor], None], size: int, dtype: torch.dtype, destination: Tensor
    ) -> float | None:
        """Let `fill` write `size` bytes into a buffer, interpret them as `dtype`, and copy them to `destination`.

        Returns a value that is out of range for the destination's dtype, if there is one.
        """
        ...

    def finish(self) -> None:
        """Wait until all copies have finished."""
        ...


class HostBuffers:
    """Buffers for destinations in main memory that have another dtype or are not contiguous."""

    def __init__(self, buffers: int, size: int) -> None:
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(torch.empty(size, dtype=torch.uint8))

    def copy_through(
        self, fill: Callable[[Tensor], None], size: int, dtype: torch.dtype, destination: Tensor
    ) -> float | None:
        buffer = self._free.get()
        try:
            part = buffer[:size]
            fill(part)
            source = part.view(dtype).view(destination.shape)
            bad = too_large_for(source, destination.dtype)
            if bad is None:
                with torch.inference_mode():  # allows writing to tensors that were created in inference mode
                    destination.copy_(source)
            return bad
        finally:
            self._free.put(buffer)

    def finish(self) -> None:
        """Copies are synchronous, so there is nothing to wait for."""


@dataclass(frozen=True)
class _Pinned:
    buffer: Tensor
    copied: torch.cuda.Event


class CudaBuffers:
    """Pinned buffers for destinations on a GPU, with a separate stream, so that reading and copying overlap."""

    def __init__(self, device: torch.device, threads: int, size: int) -> None:
        self._stream = torch.cuda.Stream(device)
        # Earlier work on the destinations, such as filling them with zeros, must finish before our copies.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._free: SimpleQueue[_Pinned] = SimpleQueue()
        for _ in range(threads + 2):  # one per reader, and two whose copies are still running
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._free.put(_Pinned(buffer, torch.cuda.Event()))

    def copy_through(
        self, fill: Callable[[Tensor], None], size: int, dtype: torch.dtype, destination: Tensor
    ) -> float | None:
        slot = self._free.get()
        try:
            slot.copied.synchronize()  # returns immediately for an event that was never recorded
            part = slot.buffer[:size]
            fill(part)
            source = part.view(dtype).view(destination.shape)
            bad = too_large_for(source, destination.dtype)
            if bad is None:
                self._copy(source, destination)
                slot.copied.record(self._stream)
            return bad
        finally:
            self._free.put(slot)

    def _copy(self, source: Tensor, destination: Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:
                source = source.to(destination.device, non_blocking=True)  # transfer first, then convert on the GPU
            destination.copy_(source, non_blocking=True)

    def finish(self) -> None:
        self._stream.synchronize()


def as_bytes(tensor: Tensor) -> Tensor:
    """A uint8 view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def too_large_for(source: Tensor, target: torch.dtype) -> float | None:
    """The largest absolute finite value if it overflows in `target`; None if all values fit."""
    if source.dtype == target or not (source.dtype.is_floating_point and target.is_floating_point):
        return None
    most = torch.finfo(target).max
    if torch.finfo(source.dtype).max <= most:
        return None
    wide = source.float() if source.dtype.itemsize == 1 else source
    lowest, highest = (float(value) for value in torch.aminmax(wide)) if wide.numel() else (0.0, 0.0)
    if not (math.isfinite(lowest) and math.isfinite(highest)):  # rare, so only this case makes a copy
        finite = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)
        lowest, highest = (float(value) for value in torch.aminmax(finite))
    worst = max(-lowest, highest)
    return worst if worst > most else None
