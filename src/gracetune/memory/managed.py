"""Managed buffers: the same bytes as a CUDA tensor and as a CPU tensor, placed and moved on request.

A `ManagedHeap` cuts buffers out of slabs. A slab holds buffers of one home, and buffers of a page or more have their
pages to themselves, so that a hint never reaches a neighbour.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from gracetune.hostmem.hint import Hint, not_applied
from gracetune.hostmem.pages import HINT_PAGE, round_up
from gracetune.memory.errors import DriverError, DriverTooOldError, UnifiedMemoryError
from gracetune.memory.native import HOST, Advice, RangeState, Span, Uvm
from gracetune.memory.slab import FreeSpace
from gracetune.units import MIB

if TYPE_CHECKING:
    import torch

Home = Literal["host", "device"]
SLAB_BYTES: Final = 64 * MIB
COLD_AFTER_SECONDS: Final = 30.0
ALIGNMENT: Final = 512
"""What torch's own allocator guarantees, and vectorised kernels count on."""


def set_home(uvm: Uvm, span: Span, home: Home) -> None:
    """Prefer `home`, and keep the range mapped for the GPU wherever its pages lie."""
    uvm.advise(span, Advice.SET_PREFERRED_LOCATION, HOST if home == "host" else span.device)
    uvm.advise(span, Advice.SET_ACCESSED_BY, span.device)


@dataclass(eq=False)
class _Slab:
    span: Span
    home: Home
    unit: int
    """What buffers in here are aligned and padded to."""
    space: FreeSpace


@dataclass(eq=False)
class _Use:
    """What has happened to a block."""

    by_gpu: bool = False
    sent_to_device: bool = False
    last_touched: float = field(default_factory=time.monotonic)
    views: weakref.WeakSet[_CudaBytes] = field(default_factory=weakref.WeakSet)

    def touch(self) -> None:
        self.by_gpu = True
        self.last_touched = time.monotonic()

    def is_cold(self, oldest: float) -> bool:
        """On the GPU, untouched for a while, and nobody holds a tensor through which it could be in use."""
        return self.sent_to_device and self.last_touched <= oldest and not self.views


@dataclass(eq=False)
class _Block:
    """Bytes handed out. Every view of a buffer refers to its block; when the last one is gone the bytes go back."""

    slab: _Slab
    span: Span
    use: _Use = field(default_factory=_Use)


@dataclass
class HintCounters:
    """What became of the hints a heap gave. Both only ever grow."""

    bytes: int = 0
    """Of buffers whose home the driver was told, each time it was."""
    refused: int = 0
    """Hints that could not be given."""


@dataclass(eq=False)
class ManagedHeap:
    """All managed buffers of one GPU. `quiesce` waits until the GPU is done with what it was given."""

    uvm: Uvm
    device: int
    quiesce: Callable[[], None]
    slab_bytes: int = SLAB_BYTES
    hints: HintCounters = field(default_factory=HintCounters)
    _slabs: list[_Slab] = field(default_factory=list)
    _returned: deque[tuple[_Slab, Span, _Use]] = field(default_factory=deque)
    _live: weakref.WeakSet[_Block] = field(default_factory=weakref.WeakSet)
    # Not re-entrant on purpose: a finalizer that runs inside this heap's own work must find it taken.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: int = field(default_factory=os.getpid)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, home: Home = "host") -> ManagedBuffer:
        """Uninitialised memory that prefers `home` and is mapped for the GPU wherever it lies."""
        if home not in ("host", "device"):
            raise ValueError(f'home is "host" or "device", not {home!r}')
        size = math.prod(shape) * dtype.itemsize
        if size <= 0 or any(side < 0 for side in shape):
            raise ValueError(f"a managed buffer of shape {tuple(shape)} has no bytes")
        with self._working():
            block = self._place(size, home)
            self._live.add(block)
            self.hints.bytes += block.span.bytes
        # The finalizer must not refer to the block itself, or the block would live for ever. At the interpreter's end
        # the process gives everything back anyway, and views may still be in use.
        weakref.finalize(block, self._give_back, block.slab, block.span, block.use).atexit = False
        return ManagedBuffer(self, block, tuple(shape), dtype)

    @property
    def held_bytes(self) -> int:
        """Managed bytes this heap holds from the driver, slack included."""
        with self._working():
            return sum(slab.span.bytes for slab in self._slabs)

    def demote_cold(self, *, at_most: int, everything: bool) -> int:
        """Send buffers that lie on the GPU and were not used lately to host memory, longest unused first.

        `everything` takes those in use along: they stay correct, only slower. Enqueued on the default stream.
        Returns the bytes sent.
        """
        oldest = math.inf if everything else time.monotonic() - COLD_AFTER_SECONDS
        sent = 0
        with self._working():
            on_device = [block for block in self._live if block.use.sent_to_device]
            cold = on_device if everything else [block for block in on_device if block.use.is_cold(oldest)]
            for block in sorted(cold, key=lambda block: block.use.last_touched):
                if sent + block.span.bytes <= at_most:
                    self.uvm.prefetch(block.span, HOST, stream=0)
                    block.use.sent_to_device = False
                    sent += block.span.bytes
        return sent

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The heap to oneself. What finalizers left to do meanwhile is done before and after."""
        with self._lock:
            self._take_back()
            yield
        self._tidy()

    def _place(self, size: int, home: Home) -> _Block:
        unit = HINT_PAGE if size >= HINT_PAGE else ALIGNMENT
        padded = round_up(size, unit)
        for slab in self._slabs:
            if (slab.home, slab.unit) == (home, unit) and (address := slab.space.take(padded, unit)) is not None:
                return _Block(slab, Span(address, padded, self.device))
        # One unit more than asked for: the driver does not promise that memory starts on a boundary of ours.
        slab = self._new_slab(max(self.slab_bytes if padded <= self.slab_bytes // 2 else 0, padded + unit), home, unit)
        address = slab.space.take(padded, unit)
        assert address is not None, "a fresh slab has room for what it was made for"
        return _Block(slab, Span(address, padded, self.device))

    def _new_slab(self, size: int, home: Home, unit: int) -> _Slab:
        span = self.uvm.allocate(size, self.device)
        try:
            set_home(self.uvm, span, home)
        except UnifiedMemoryError:
            self.hints.refused += 1
            self.uvm.free(span)
            raise
        slab = _Slab(span, home, unit, FreeSpace(span.pointer, size))
        self._slabs.append(slab)
        return slab

    def _give_back(self, slab: _Slab, span: Span, use: _Use) -> None:
        """A finalizer: it may run anywhere, in the middle of this heap's own work too, so it takes note first."""
        if os.getpid() == self._process:  # in a forked child these bytes do not exist
            self._returned.append((slab, span, use))
            self._tidy()

    def _tidy(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        """Return what finalizers noted to the slabs, after one wait for the GPU however many there are."""
        noted = [self._returned[index] for index in range(len(self._returned))]
        if any(use.by_gpu for _, _, use in noted):
            self.quiesce()
        for slab, span, _ in noted:
            self._returned.popleft()
            slab.space.give_back(span.pointer, span.bytes)
            if slab.space.is_empty:
                self._slabs.remove(slab)
                self.uvm.free(slab.span)
            elif slab.unit >= HINT_PAGE:
                set_home(self.uvm, span, slab.home)  # whoever gets these pages next was promised the slab's home


class _CudaBytes:
    """A block as CUDA's array protocol knows it; torch keeps a reference to it for as long as the tensor lives."""

    def __init__(self, block: _Block, size: int) -> None:
        self._block = block
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (block.span.pointer, False),
            "strides": None,
            "stream": None,
        }


@lru_cache(maxsize=64)
def _host_type(size: int) -> Any:
    return type("ManagedHostBytes", (ctypes.c_uint8 * size,), {})  # a plain array type takes no attributes


def _host_bytes(block: _Block, size: int) -> Any:
    view = _host_type(size).from_address(block.span.pointer)
    view.block = block  # the tensor keeps the array, the array keeps the block
    return view


class ManagedBuffer:
    """One tensor's worth of managed memory. Free when it and every view of it are gone; `close()` drops its own."""

    def __init__(self, heap: ManagedHeap, block: _Block, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.device, self.home = heap.device, block.slab.home
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._heap = heap
        self._held: _Block | None = block

    def close(self) -> None:
        self._held = None

    def __enter__(self) -> ManagedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _block(self) -> _Block:
        if self._held is None:
            raise UnifiedMemoryError("this managed buffer was closed\n  try  take its views before closing it")
        return self._held

    @property
    def span(self) -> Span:
        """The bytes of this buffer: whole pages if it has pages to itself."""
        return self._block.span

    def cuda(self) -> torch.Tensor:
        """A CUDA tensor over these bytes; kernels read and write them wherever they lie."""
        import torch

        self._heap.uvm.total_stats()  # refuses in a forked child, where these bytes do not exist
        self._block.use.touch()
        exported = _CudaBytes(self._block, self.nbytes)
        self._block.use.views.add(exported)
        flat = torch.as_tensor(exported, device=f"cuda:{self.device}")
        if flat.data_ptr() != self.span.pointer:
            raise UnifiedMemoryError("torch copied managed memory instead of viewing it\n  try  report its version")
        return flat.view(self.dtype).view(self.shape)

    def cpu(self) -> torch.Tensor:
        """A CPU tensor over the same bytes. The GPU's pending writes are not waited for: `host()` does that."""
        import torch

        self._heap.uvm.total_stats()  # refuses in a forked child, where these bytes do not exist
        return torch.frombuffer(_host_bytes(self._block, self.nbytes), dtype=self.dtype).view(self.shape)

    @contextmanager
    def host(self) -> Iterator[torch.Tensor]:
        """The CPU tensor, after everything the GPU was given has finished."""
        self._heap.quiesce()
        yield self.cpu()

    def rehome(self, home: Home) -> Hint:
        """Prefer another home from now on. Pages move when they are next touched or prefetched."""
        block = self._block
        counters = self._heap.hints
        if block.slab.unit < HINT_PAGE:
            counters.refused += 1
            return not_applied(f"{self.nbytes} bytes share a page with other buffers")
        try:
            set_home(self._heap.uvm, block.span, home)
        except (DriverError, DriverTooOldError) as error:
            counters.refused += 1
            return not_applied(f"the driver refused: {str(error).splitlines()[0]}")
        counters.bytes += block.span.bytes
        self.home = home
        return Hint(True, block.span.bytes, f"prefers the {home}")

    def prefetch(self, where: Home, stream: int) -> Hint:
        """Enqueue the move on a CUDA stream."""
        block = self._block
        block.use.touch()
        block.use.sent_to_device = where == "device"
        self._heap.uvm.prefetch(block.span, HOST if where == "host" else self.device, stream)
        return Hint(True, block.span.bytes, f"moving to the {where}")

    def state(self) -> RangeState:
        """What the driver was told about these bytes."""
        return self._heap.uvm.range_state(self._block.span)
