"""Gradient checkpointing whose saved block inputs are kept in host memory until the backward pass.

    denoiser.enable_gradient_checkpointing(ActivationParking.on(device).checkpoint)

Checkpointing keeps only the inputs of each block. This module copies them to the host while the next block runs, and
copies each one back one block before the backward pass needs it. The newest few also stay on the device, because the
backward pass begins with them. All copies run on one stream, so a reused host buffer is overwritten only after the
copy that read it has finished.

Device memory is freed in stream order: the compute stream waits for a copy before the copied tensor is dropped, so the
next tensor can reuse its memory immediately. `record_stream` would instead hold the memory until the host observes that
the copy has finished. The host can run a whole forward pass ahead of the device, so every input would stay allocated.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gracetune.models.footprint import UNPARKED_INPUTS
from gracetune.models.parking import CudaLane, InlineLane, Lane, pinned_bytes
from gracetune.units import MIB, format_bytes, format_duration

LEAST: Final = MIB
"""Smaller tensors (time embeddings, masks) stay on the device."""


@dataclass
class ParkingStats:
    """Totals over all steps. Times come from device events and are read only once complete, so they lag slightly."""

    parked_bytes: int = 0
    returned_bytes: int = 0
    waited_ms: float = 0.0
    """Time the device stalled because an input had not come back yet."""
    stayed: int = 0
    """Inputs that were still on the device when they were needed."""
    returned: int = 0
    """Inputs that were copied back to the device."""

    @property
    def line(self) -> str:
        moved = f"{format_bytes(self.parked_bytes)} to host memory, {format_bytes(self.returned_bytes)} back"
        return f"blocks' inputs: {moved}; the device waited {format_duration(self.waited_ms / 1000)} for them"


class Clock(Protocol):
    def mark(self) -> Any: ...

    def is_past(self, mark: Any) -> bool: ...

    def between_ms(self, first: Any, second: Any) -> float: ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def between_ms(self, first: float, second: float) -> float:
        return 1000 * (second - first)


class CudaClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def between_ms(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second))


class _Parked:
    """One input: its host buffer and, while present, its tensor on the device."""

    def __init__(self, tensor: Tensor, home: Tensor) -> None:
        self.home, self.dtype, self.shape, self.bytes = home, tensor.dtype, tensor.shape, tensor.nbytes
        self.on_device: Tensor | None = tensor
        self.version = tensor._version
        self.came_back = False
        self.copied: Any = None
        """Marks the end of the copy to the host."""

    def view(self, block: Tensor) -> Tensor:
        return block[: self.bytes].view(self.dtype).view(self.shape)


class ActivationParking:
    """Checkpoints blocks and parks their inputs in host memory. `on` builds one for a device."""

    def __init__(
        self, device: torch.device, lane: Lane, clock: Clock, new_home: Callable[[int], Tensor], *, least: int = LEAST
    ) -> None:  # fmt: skip
        """`new_home(size)` allocates `size` bytes of host memory, pinned if copies are to overlap with compute."""
        self.stats = ParkingStats()
        self._device, self._lane, self._clock, self._new_home, self._least = device, lane, clock, new_home, least
        self._free: dict[int, list[Tensor]] = {}
        """Host buffers that can be reused, by size."""
        self._order: list[weakref.ref[_Parked]] = []
        """Inputs of this forward pass, in order; the backward pass uses them from the end."""
        self._newest: deque[_Parked] = deque()
        self._given: list[weakref.ref[Tensor]] = []
        """Tensors given to the previous block. One that the next block gets too (a caption) is shared by all blocks and
        stays on the device."""
        self._shared: set[int] = set()
        self._waits: deque[tuple[Any, Any]] = deque()
        self._coming: list[Tensor] = []
        """Destinations of copies that have not been synchronized yet. Kept alive here even if every other reference
        goes."""

    @classmethod
    def on(cls, device: torch.device) -> ActivationParking:
        if device.type == "cuda":
            registry = torch.cuda.cudart()
            return cls(device, CudaLane(device), CudaClock(), lambda size: pinned_bytes(size, registry))
        return cls(device, InlineLane(), HostClock(), lambda size: torch.empty(size, dtype=torch.uint8))

    def checkpoint(self, block: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """torch's `checkpoint`, as a function for diffusers' `enable_gradient_checkpointing`."""
        tensors = [one for one in torch.utils._pytree.tree_leaves((inputs, named)) if isinstance(one, Tensor)]
        before = [tensor for one in self._given if (tensor := one()) is not None]
        # Compared by identity, not only by address: a later input may be allocated at the address of an earlier one.
        self._shared = {one.data_ptr() for one in tensors if any(one is other for other in before)}
        self._given = [weakref.ref(one) for one in tensors]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(block, *inputs, use_reentrant=False, **named)

    # -- to the host ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | _Parked:
        # A non-contiguous tensor would come back with other strides, and a compiled block guards on strides.
        if tensor.nbytes < self._least or not tensor.is_contiguous() or tensor.device.type != self._device.type:
            return tensor
        if tensor.data_ptr() in self._shared:
            return tensor
        return self._park(tensor.detach())

    def _park(self, tensor: Tensor) -> _Parked:
        """Start copying an input to the host. Drops the device tensors of all but the newest inputs."""
        if not any(one() is not None for one in self._order):
            self._order.clear()  # a new step has begun
            self._newest.clear()
            self._count_waits()
        if self._coming:  # left over from a backward pass that did not finish
            self._join()
        homes = self._free.setdefault(tensor.nbytes, [])
        home = homes.pop() if homes else self._new_home(tensor.nbytes)
        parked = _Parked(tensor, home)
        # The host buffer returns to the free list when autograd drops the saved input.
        weakref.finalize(parked, homes.append, home).atexit = False
        with self._lane.beside():
            parked.view(home).copy_(tensor, non_blocking=True)
        parked.copied = self._lane.mark()
        self.stats.parked_bytes += parked.bytes
        self._order.append(weakref.ref(parked))
        self._newest.append(parked)
        # The compute stream waits for the copy before the tensor is dropped. The allocator can then reuse its memory
        # for the next tensor in stream order, without waiting for the host.
        while len(self._newest) > UNPARKED_INPUTS:
            leaving = self._newest.popleft()
            self._lane.wait(leaving.copied)
            leaving.on_device = None
        return parked

    # -- back to the device --------------------------------------------------------------------------------------------

    def _unpack(self, kept: Tensor | _Parked) -> Tensor:
        """The input for recomputing its block; waits for the copy if it is not on the device yet."""
        if isinstance(kept, Tensor):
            return kept
        self._newest.clear()  # autograd holds the inputs it still needs; this step parks no more
        stayed = not kept.came_back and kept.on_device is not None
        self._fetch(kept)
        assert kept.on_device is not None
        if stayed and kept.on_device._version != kept.version:
            raise RuntimeError("a block's input was changed in place between its forward and its backward pass")
        # The copy was started one block ago. The time between the two marks is how long the device still waits for it.
        if kept.came_back:
            before = self._clock.mark()
            self._join()
            self._waits.append((before, self._clock.mark()))
        self.stats.stayed += stayed
        found = kept.on_device
        self._look_ahead(kept)
        return found

    def _join(self) -> None:
        self._lane.join()
        self._coming.clear()

    def _look_ahead(self, now: _Parked) -> None:
        """Start copying the input of the block before this one. It runs after the join above, so nothing waits for it
        before that block's turn."""
        alive = [parked for one in self._order if (parked := one()) is not None]
        position = next(number for number, parked in enumerate(alive) if parked is now)
        if position > 0:
            self._fetch(alive[position - 1])

    def _fetch(self, parked: _Parked) -> None:
        if parked.on_device is not None:
            return
        block = torch.empty(parked.shape, dtype=parked.dtype, device=self._device)
        with self._lane.beside():
            block.copy_(parked.view(parked.home), non_blocking=True)
        self._coming.append(block)
        parked.on_device, parked.came_back = block, True
        self.stats.returned_bytes += parked.bytes
        self.stats.returned += 1

    def _count_waits(self) -> None:
        """Add the waits whose events have completed, without synchronizing with the device."""
        while self._waits and self._clock.is_past(self._waits[0][1]):
            self.stats.waited_ms += self._clock.between_ms(*self._waits.popleft())
