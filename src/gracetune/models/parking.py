"""Moving frozen weights off the GPU while they are not needed, and back unchanged.

Parked are the tensors of a module that need no gradient: base weights and buffers. Adapters stay on the device: they
are small, and optimizers and hooks hold references to them. All parked tensors of a module are stored in one block, so
that a move is one copy and torch's allocator can reuse the same block every time.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gracetune.hostmem.hint import round_up
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.managed import ManagedBuffer, ManagedHeap

_ALIGNMENT = 512
"""The alignment torch's allocator guarantees. A multiple of 8, because the checksum reads 8-byte words."""


class Parking(Protocol):
    """The frozen weights of one module."""

    @property
    def bytes(self) -> int:
        """Device memory they occupy while they are on the device."""

    @property
    def managed(self) -> int:
        """How much of that is managed memory, which the driver keeps after they left until something else needs it."""

    def start(self) -> None:
        """Start bringing them to the device, concurrently with its other work."""

    def finish(self) -> None:
        """Make work that is queued from now on find them on the device."""

    def park(self) -> None:
        """Free their device memory. Work that was queued before still finds them."""


class NoParking:
    """Parking that moves nothing: everything fits, or there is only one memory."""

    bytes = managed = 0

    def start(self) -> None: ...

    def finish(self) -> None: ...

    def park(self) -> None: ...


def frozen_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that parking moves, each once: parameters without gradient, and buffers. Skips empty and meta
    ones."""
    tensors = [*module.parameters(), *module.buffers()]
    unique = {id(tensor): tensor for tensor in tensors if not tensor.requires_grad and tensor.numel() > 0}
    return list(unique.values())


@dataclass(frozen=True)
class _Slot:
    """One tensor and its position in the block."""

    tensor: Tensor
    offset: int
    size: int

    def view(self, block: Tensor) -> Tensor:
        part = block[self.offset : self.offset + self.size]
        return part.view(self.tensor.dtype).view(self.tensor.shape)


def _slots(tensors: list[Tensor]) -> tuple[list[_Slot], int]:
    """A slot for each tensor, and the size of the block."""
    slots, end = [], 0
    for tensor in tensors:
        slots.append(_Slot(tensor, end, tensor.nbytes))
        end = round_up(end + tensor.nbytes, _ALIGNMENT)
    return slots, end


def _point(slots: list[_Slot], block: Tensor) -> None:
    """Make the tensors views of `block`."""
    for slot in slots:
        slot.tensor.data = slot.view(block)


def _take_back(slots: list[_Slot], block: Tensor) -> None:
    """Copy tensors that were given other memory since (a cast and back, a merge) back into their block."""
    for slot in slots:
        if slot.tensor.data_ptr() != slot.view(block).data_ptr():
            slot.view(block).copy_(slot.tensor.data)
            slot.tensor.data = slot.view(block)


# -- a copy in pinned host memory --------------------------------------------------------------------------------------


class Lane(Protocol):
    """A queue for copies that run concurrently with the device's compute."""

    def beside(self) -> AbstractContextManager[object]:
        """A context whose copies run after the compute queued so far and do not delay the compute queued next."""

    def join(self) -> None:
        """Make compute that is queued from now on wait for all copies."""

    def mark(self) -> Any:
        """Mark the end of the copies queued so far."""

    def wait(self, mark: Any) -> None:
        """Make compute that is queued from now on wait for the copies up to this mark."""


class CudaLane:
    """A stream of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def beside(self) -> AbstractContextManager[object]:
        # The block's memory may just have been freed on the current stream, whose last use of it must be done first.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream


class InlineLane:
    """The lane of a device without streams: copies run immediately."""

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None: ...

    def mark(self) -> None: ...

    def wait(self, mark: Any) -> None: ...


class CopyParking:
    """Parking with a copy in host memory. The device has a second copy while the weights are needed.

    Frozen weights do not change, so parking normally copies nothing and just drops the device's copy. A merged adapter
    changes them in place, however. A checksum, which takes the device one read of its memory, detects this; changed
    weights are copied to the host first.
    """

    managed = 0

    def __init__(
        self, module: nn.Module | list[Tensor], device: torch.device, lane: Lane, home: Tensor | None = None
    ) -> None:  # fmt: skip
        """`module` is a module or a list of its tensors. `home` is host memory of the right size, pinned if copies are
        to run concurrently; None allocates pageable memory."""
        self._slots, self.bytes = _slots(frozen_tensors(module) if isinstance(module, nn.Module) else module)
        self._device, self._lane = device, lane
        self._home = torch.zeros(self.bytes, dtype=torch.uint8) if home is None else home
        self._block: Tensor | None = None
        self._arrived: Any = None
        self._checksum: Tensor | None = None
        for slot in self._slots:  # one by one: each tensor's old memory is freed before the next one is copied
            slot.view(self._home).copy_(slot.tensor.data)
            slot.tensor.data = slot.view(self._home)

    @classmethod
    def of(
        cls, tensors: list[Tensor], device: torch.device, lane: Lane, new_home: Callable[[int], Tensor] | None
    ) -> CopyParking:  # fmt: skip
        _, size = _slots(tensors)
        return cls(tensors, device, lane, None if new_home is None else new_home(size))

    def start(self) -> None:
        if self._block is not None:
            return
        self._block = torch.empty(self.bytes, dtype=torch.uint8, device=self._device)
        with self._lane.beside():
            self._block.copy_(self._home, non_blocking=True)
        self._arrived = self._lane.mark()

    def expect(self) -> None:
        """Point the tensors at their device memory. `finish` must be called before they are read."""
        self.start()
        if self._block is not None and self._checksum is None:
            _point(self._slots, self._block)

    def finish(self) -> None:
        self.start()
        assert self._block is not None
        if self._checksum is not None:
            return
        self._lane.wait(self._arrived)
        _point(self._slots, self._block)
        self._checksum = _checksum(self._block)

    def park(self, *, unchanged: bool = False) -> None:
        """`unchanged`: the caller has checked `has_changed` already, so the host need not wait for the result."""
        if self._block is None:
            return
        self._lane.join()
        if not unchanged and self._checksum is not None and bool(self.has_changed()):
            self.copy_to_host()
        _point(self._slots, self._home)
        self._block = self._arrived = self._checksum = None

    def has_changed(self) -> Tensor:
        """Whether the weights differ from what was copied to the device, as a tensor on it. False if nothing was."""
        if self._block is None or self._checksum is None:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        _take_back(self._slots, self._block)
        return _checksum(self._block) != self._checksum

    def copy_to_host(self) -> None:
        """Copy the weights' current values to the host."""
        assert self._block is not None
        self._home.copy_(self._block)


def _checksum(block: Tensor) -> Tensor:
    """The wrapping sum of all 8-byte words. Not cryptographic: it only has to detect changes made by training code."""
    return block[: block.numel() // 8 * 8].view(torch.int64).sum()


class HostRegistry(Protocol):
    """The two functions of the CUDA runtime that pin memory, as in `torch.cuda.cudart()`."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> int: ...  # noqa: N802 - CUDA's name

    def cudaHostUnregister(self, pointer: int, /) -> int: ...  # noqa: N802


def pinned_bytes(size: int, registry: HostRegistry) -> Tensor:
    """Host memory of exactly this size, pinned until the last view of it is freed.

    torch's own pinned allocator rounds up to a power of two, which wastes 4 GB of 28.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size)
    with suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # pinning takes time per page, so fewer are faster
    torch.frombuffer(memory, dtype=torch.uint8).zero_()  # pages appear here with all threads, in registering with one
    kind: Any = type("PinnedBytes", (ctypes.c_uint8 * size,), {})
    view = kind.from_buffer(memory)
    pointer = ctypes.addressof(view)
    code = int(registry.cudaHostRegister(pointer, size, 0))
    if code != 0:
        raise UnifiedMemoryError(
            f"{size:,} bytes of host memory cannot be pinned (CUDA error {code})\n"
            "  try  ulimit -l unlimited, or free host memory"
        )
    # The finalizer must run before the memory is unmapped. It does: the view's finalizers run before it releases mmap.
    weakref.finalize(view, _unpin, registry, pointer).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _unpin(registry: HostRegistry, pointer: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a copy may still be reading this memory
    registry.cudaHostUnregister(pointer)


# -- managed memory ---------------------------------------------------------------------------------------------------


class ManagedParking:
    """Parking in managed memory. There is only one copy of the weights, and their pages migrate.

    The weights are usable wherever their pages are: a kernel that reads them too early is slow, not wrong. The
    preferred location stays the host, because setting another one takes longer than the migration itself (measured on
    an H200 over PCIe: 18 ms for 384 MiB, against 8). A prefetch that has to wait for a stream returns immediately; any
    other blocks the host until the pages have moved. Each prefetch is therefore queued behind the device's current
    work.
    """

    def __init__(self, module: nn.Module, heap: ManagedHeap) -> None:
        self._slots, self.bytes = _slots(frozen_tensors(module))
        self.managed = self.bytes
        self._device = torch.device("cuda", heap.device)
        self._lane = CudaLane(self._device)
        self._buffer: ManagedBuffer | None = heap.empty((self.bytes,), torch.uint8, "host") if self._slots else None
        self._on_device = False
        if self._buffer is not None:
            block = self._buffer.cuda()
            for slot in self._slots:
                slot.view(block).copy_(slot.tensor.data)
                slot.tensor.data = slot.view(block)

    def start(self) -> None:
        if self._buffer is not None and not self._on_device:
            with self._lane.beside():
                self._buffer.prefetch("device", self._lane.handle)
            self._on_device = True

    def finish(self) -> None:
        self.start()
        self._lane.join()

    def park(self) -> None:
        """Migrate the pages concurrently with the device's next work. Until then the driver evicts them if needed."""
        if self._buffer is not None and self._on_device:
            _take_back(self._slots, self._buffer.cuda())
            with self._lane.beside():
                self._buffer.prefetch("host", self._lane.handle)
            self._on_device = False


class ParkingRoom(Protocol):
    def __call__(self, *, on_device: int, elsewhere: int) -> int:
        """Bytes the device could still take. `on_device`: managed bytes of modules on the device; `elsewhere`: those of
        parked modules."""


def device_room(device: torch.device) -> ParkingRoom:
    """A `ParkingRoom` for this device: free memory, torch's unused cache, and pages of parked modules that the driver
    keeps.

    The driver does not report the latter as free, although it evicts them on demand.
    """
    free, total = torch.cuda.mem_get_info(device)
    # Memory in use besides torch's: the CUDA context and other processes. No managed pages are on the device yet.
    others = total - free - torch.cuda.memory_reserved(device)

    def room(*, on_device: int, elsewhere: int) -> int:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        managed = total - free - reserved - others
        kept = min(elsewhere, max(0, managed - on_device))
        return free + reserved - torch.cuda.memory_allocated(device) + kept

    return room
