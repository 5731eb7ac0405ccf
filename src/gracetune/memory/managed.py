"""Managed buffers: the same bytes as a CUDA tensor and as a CPU tensor, with a chosen location.

A `ManagedHeap` allocates buffers from slabs. All buffers of a slab have the same preferred location ("home"). Buffers
of a page or more do not share pages, so a hint never affects another buffer.

`ManagedSlab` is the counterpart of `hostmem.slab`: one buffer for a whole cache.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from gracetune.hostmem.hint import HINT_PAGE, Hint, not_applied, round_up
from gracetune.memory.errors import DriverError, DriverTooOldError, UnifiedMemoryError
from gracetune.memory.native import HOST, Advice, ManagedSpan, RangeState, Uvm
from gracetune.units import MIB

if TYPE_CHECKING:
    import torch

Home = Literal["host", "device"]
SLAB_BYTES: Final = 64 * MIB
COLD_AFTER_SECONDS: Final = 30.0
"""A buffer that was not used for longer is cold."""
ALIGNMENT: Final = 512
"""The alignment that torch's allocator guarantees and vectorized kernels rely on."""


def set_home(uvm: Uvm, span: ManagedSpan, home: Home) -> None:
    """Set the preferred location, and keep the range mapped for the GPU wherever its pages are."""
    uvm.advise(span, Advice.SET_PREFERRED_LOCATION, HOST if home == "host" else span.device)
    uvm.advise(span, Advice.SET_ACCESSED_BY, span.device)


@dataclass(eq=False)
class _Slab:
    """One allocation from the driver."""

    span: ManagedSpan
    home: Home
    unit: int
    """Alignment and padding of its buffers."""
    space: FreeSpace


@dataclass(eq=False)
class _Use:
    """How a block has been used."""

    by_gpu: bool = False
    """The GPU may have used it, so it is freed only after waiting for the GPU."""
    sent_to_device: bool = False
    """It was prefetched to the GPU and has not been demoted since."""
    last_touched: float = field(default_factory=time.monotonic)
    views: weakref.WeakSet[_CudaBytes] = field(default_factory=weakref.WeakSet)

    def touch(self) -> None:
        self.by_gpu = True
        self.last_touched = time.monotonic()

    def is_cold(self, oldest: float) -> bool:
        """Whether the block is on the GPU, unused since `oldest`, and without live CUDA tensors."""
        return self.sent_to_device and self.last_touched <= oldest and not self.views


@dataclass(eq=False)
class _Block:
    """An allocated range. Every view of a buffer references its block; without references, the range is freed."""

    slab: _Slab
    span: ManagedSpan
    use: _Use = field(default_factory=_Use)


@dataclass
class HintCounters:
    """Counters of the hints that a heap gave. Both increase monotonically."""

    bytes: int = 0
    """Bytes of buffers whose home was set, counted each time."""
    refused: int = 0
    """Number of hints that were not applied."""


@dataclass(eq=False)
class ManagedHeap:
    """All managed buffers of one GPU. `quiesce` waits until the GPU has finished all enqueued work."""

    uvm: Uvm
    device: int
    quiesce: Callable[[], None]
    slab_bytes: int = SLAB_BYTES
    hints: HintCounters = field(default_factory=HintCounters)
    _slabs: list[_Slab] = field(default_factory=list)
    _returned: deque[tuple[_Slab, ManagedSpan, _Use]] = field(default_factory=deque)
    """Blocks that finalizers have queued to be freed."""
    _live: weakref.WeakSet[_Block] = field(default_factory=weakref.WeakSet)
    # Deliberately not re-entrant. A finalizer may run in the middle of a heap operation on the same thread; it must
    # find the lock taken and leave its work to that operation.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: int = field(default_factory=os.getpid)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, home: Home = "host") -> ManagedBuffer:
        """Allocate an uninitialized buffer that prefers `home` and is mapped for the GPU wherever it is."""
        if home not in ("host", "device"):
            raise ValueError(f'home is "host" or "device", not {home!r}')
        size = math.prod(shape) * dtype.itemsize
        if size <= 0 or any(side < 0 for side in shape):
            raise ValueError(f"a managed buffer of shape {tuple(shape)} has no bytes")
        with self._working():
            block = self._allocate(size, home)
            self._live.add(block)
            self.hints.bytes += block.span.bytes
        # The finalizer must not reference the block, or the block would never be freed. It does not run at exit,
        # because views may still be in use then, and the end of the process frees everything.
        weakref.finalize(block, self._give_back, block.slab, block.span, block.use).atexit = False
        return ManagedBuffer(self, block, tuple(shape), dtype)

    @property
    def held_bytes(self) -> int:
        """Managed bytes allocated from the driver, including unused parts of slabs. Frees queued blocks first."""
        with self._working():
            return sum(slab.span.bytes for slab in self._slabs)

    def demote_cold(self, *, at_most: int, include_recent: bool) -> int:
        """Migrate up to `at_most` bytes of buffers from the GPU to host memory, the least recently used first.

        Candidates are buffers that were not used recently; with `include_recent` all are, even those in use, which stay
        correct but become slower. The migrations are enqueued on the default stream. Returns the bytes migrated.
        """
        oldest = math.inf if include_recent else time.monotonic() - COLD_AFTER_SECONDS
        sent = 0
        with self._working():
            on_device = [block for block in self._live if block.use.sent_to_device]
            cold = on_device if include_recent else [block for block in on_device if block.use.is_cold(oldest)]
            for block in sorted(cold, key=lambda block: block.use.last_touched):
                if sent + block.span.bytes <= at_most:
                    self.uvm.prefetch(block.span, HOST, stream=0)
                    block.use.sent_to_device = False
                    sent += block.span.bytes
        return sent

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Hold the heap's lock. Deferred work of finalizers is done before and after."""
        with self._lock:
            self._take_back()
            yield
        self._tidy()

    def _allocate(self, size: int, home: Home) -> _Block:
        unit = HINT_PAGE if size >= HINT_PAGE else ALIGNMENT
        padded = round_up(size, unit)
        for slab in self._slabs:
            if (slab.home, slab.unit) == (home, unit) and (address := slab.space.take(padded, unit)) is not None:
                return _Block(slab, ManagedSpan(address, padded, self.device))
        # One extra unit, because the driver does not guarantee our alignment.
        slab = self._new_slab(max(self.slab_bytes if padded <= self.slab_bytes // 2 else 0, padded + unit), home, unit)
        address = slab.space.take(padded, unit)
        assert address is not None, "a new slab has space for the buffer it was created for"
        return _Block(slab, ManagedSpan(address, padded, self.device))

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

    def _give_back(self, slab: _Slab, span: ManagedSpan, use: _Use) -> None:
        """Finalizer of a block. It may run at any point, even inside a heap operation, so it only queues the block."""
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
        """Free the queued blocks. Waits at most once for the GPU, which may still use them."""
        # A copy, because finalizers may append while this runs. The loop below removes exactly these entries.
        queued = [self._returned[index] for index in range(len(self._returned))]
        if any(use.by_gpu for _, _, use in queued):
            self.quiesce()
        for slab, span, _ in queued:
            self._returned.popleft()
            slab.space.give_back(span.pointer, span.bytes)
            if slab.space.is_empty:
                self._slabs.remove(slab)
                self.uvm.free(slab.span)
            elif slab.unit >= HINT_PAGE:
                set_home(self.uvm, span, slab.home)  # undo a rehome(): the next buffer here expects the slab's home


class _CudaBytes:
    """A block that implements the CUDA array interface. A tensor made from it holds a reference to it."""

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
    """Managed memory for one tensor. It is freed when the buffer and all views have been dropped; `close()` drops the
    buffer."""

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
    def span(self) -> ManagedSpan:
        """The address range of this buffer. For buffers of a page or more it consists of whole pages."""
        return self._block.span

    def cuda(self) -> torch.Tensor:
        """A CUDA tensor over these bytes. Kernels can read and write them wherever the pages are."""
        import torch

        self._heap.uvm.total_stats()  # raises in a forked process, where managed memory does not exist
        self._block.use.touch()
        exported = _CudaBytes(self._block, self.nbytes)
        self._block.use.views.add(exported)
        flat = torch.as_tensor(exported, device=f"cuda:{self.device}")
        if flat.data_ptr() != self.span.pointer:
            raise UnifiedMemoryError("torch copied managed memory instead of viewing it\n  try  report its version")
        return flat.view(self.dtype).view(self.shape)

    def cpu(self) -> torch.Tensor:
        """A CPU tensor over the same bytes. This does not wait for pending writes of the GPU; `host()` does."""
        import torch

        self._heap.uvm.total_stats()  # raises in a forked process, where managed memory does not exist
        return torch.frombuffer(_host_bytes(self._block, self.nbytes), dtype=self.dtype).view(self.shape)

    @contextmanager
    def host(self) -> Iterator[torch.Tensor]:
        """The CPU tensor, after the GPU has finished all enqueued work."""
        self._heap.quiesce()
        yield self.cpu()

    def rehome(self, home: Home) -> Hint:
        """Change the preferred location. Pages migrate when they are next accessed or prefetched."""
        block = self._block
        counters = self._heap.hints
        if block.slab.unit < HINT_PAGE:
            counters.refused += 1
            return not_applied(f"{self.nbytes} bytes share a page with other buffers")
        try:
            set_home(self._heap.uvm, block.span, home)
        except (DriverError, DriverTooOldError) as error:
            counters.refused += 1
            return not_applied(f"the driver rejected it: {str(error).splitlines()[0]}")
        counters.bytes += block.span.bytes
        self.home = home
        return Hint(applied=True, bytes=block.span.bytes, reason=f"prefers the {home}")

    def prefetch(self, target: Home, stream: int) -> Hint:
        """Enqueue the migration on a CUDA stream."""
        block = self._block
        block.use.touch()
        block.use.sent_to_device = target == "device"
        self._heap.uvm.prefetch(block.span, HOST if target == "host" else self.device, stream)
        return Hint(applied=True, bytes=block.span.bytes, reason=f"moving to the {target}")

    def state(self) -> RangeState:
        """The hints that the driver has for these bytes."""
        return self._heap.uvm.range_state(self._block.span)


# -- parts of a slab ---------------------------------------------------------------------------------------------------


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


# -- a slab for a cache ------------------------------------------------------------------------------------------------


class ManagedSlab:
    """A slab that CPU and GPU can both access, wherever its pages are."""

    def __init__(self, heap: ManagedHeap, size: int, home: Home) -> None:
        import torch

        self._buffer: ManagedBuffer = heap.empty((max(size, 1),), torch.uint8, home)
        self.home = home
        self.host = self._buffer.cpu()
        self.view = self._buffer.cuda()
        self.notes: tuple[str, ...] = ()

    def settle(self) -> None:
        """Move pages to the device if they belong there. The CPU has written them, so they are in host memory."""
        import torch

        if self.home == "device":
            stream = torch.cuda.current_stream(self._buffer.device)
            self._buffer.prefetch("device", stream.cuda_stream)
            stream.synchronize()

    def move(self, home: Home, stream: int) -> Hint:
        """Change the preferred location and start the migration on a CUDA stream. Reads stay correct meanwhile."""
        hint = self._buffer.rehome(home)
        if hint:
            self._buffer.prefetch(home, stream)
            self.home = home
        return hint

    def close(self) -> None:
        import torch

        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        self._buffer.close()
