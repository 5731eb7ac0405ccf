"""Frozen weights that are away from the GPU while nobody needs them, and come back exactly as they were.

What is parked are the tensors of a module that need no gradient: base weights and buffers. Adapters stay where they
are: they are small, and optimizers and hooks hold on to them. All of a module's parked tensors lie in one block, so a
move is one copy, and torch's allocator hands out the same block every time.
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

from gracetune.hostmem.pages import round_up
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.managed import ManagedBuffer, ManagedHeap

_ALIGNMENT = 512
"""What torch's own allocator guarantees; also a multiple of the 8 bytes the checksum reads at once."""


class Parking(Protocol):
    """The frozen weights of one module."""

    @property
    def bytes(self) -> int:
        """Device memory they take while they are there."""

    @property
    def managed(self) -> int:
        """So much of that is managed memory: when they leave, the driver keeps it until somebody needs it."""

    def start(self) -> None:
        """Begin to bring them to the device, beside whatever it is doing."""

    def finish(self) -> None:
        """Work that is queued from now on finds them on the device."""

    def park(self) -> None:
        """Give up their device memory. What was queued before still finds them."""


class Staying:
    """Nothing moves: both fit, or there is only one memory."""

    bytes = managed = 0

    def start(self) -> None: ...

    def finish(self) -> None: ...

    def park(self) -> None: ...


def frozen_tensors(module: nn.Module) -> list[Tensor]:
    """Each tensor that parking moves, once: parameters without gradient, and buffers. Not what is on meta or empty."""
    tensors = [*module.parameters(), *module.buffers()]
    unique = {id(tensor): tensor for tensor in tensors if not tensor.requires_grad and tensor.numel() > 0}
    return list(unique.values())


@dataclass(frozen=True)
class _Slot:
    """One tensor and its place in the block."""

    tensor: Tensor
    offset: int
    size: int

    def view(self, block: Tensor) -> Tensor:
        part = block[self.offset : self.offset + self.size]
        return part.view(self.tensor.dtype).view(self.tensor.shape)


def _slots(tensors: list[Tensor]) -> tuple[list[_Slot], int]:
    slots, end = [], 0
    for tensor in tensors:
        slots.append(_Slot(tensor, end, tensor.nbytes))
        end = round_up(end + tensor.nbytes, _ALIGNMENT)
    return slots, end


def _point(slots: list[_Slot], block: Tensor) -> None:
    for slot in slots:
        slot.tensor.data = slot.view(block)


def _take_back(slots: list[_Slot], block: Tensor) -> None:
    """Tensors that somebody gave other memory (a cast and back, a merge) return to their block with what they hold."""
    for slot in slots:
        if slot.tensor.data_ptr() != slot.view(block).data_ptr():
            slot.view(block).copy_(slot.tensor.data)
            slot.tensor.data = slot.view(block)


# -- a copy in pinned memory ------------------------------------------------------------------------------------------


class Lane(Protocol):
    """Where copies run beside the device's work."""

    def beside(self) -> AbstractContextManager[object]:
        """Copies made in here come after what the device was given so far, and do not hold up what it is given next."""

    def join(self) -> None:
        """What the device is given from now on comes after those copies."""

    def mark(self) -> Any:
        """The end of the copies so far."""

    def wait(self, mark: Any) -> None:
        """What the device is given from now on comes after the copies up to there."""


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def beside(self) -> AbstractContextManager[object]:
        # The block was taken from the current stream's memory: its last user there must be done with it.
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
    """For a device without streams."""

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None: ...

    def mark(self) -> None: ...

    def wait(self, mark: Any) -> None: ...


class CopyParking:
    """The weights' home is host memory; the device has a copy while they are needed.

    Frozen weights do not change, so parking them copies nothing: the device's copy is dropped. Whether they really did
    not (a merged adapter changes them in place) is asked of a checksum that the device computes in the time it takes to
    read its own memory once; if it differs, they are copied home first.
    """

    managed = 0

    def __init__(
        self, module: nn.Module | list[Tensor], device: torch.device, lane: Lane, home: Tensor | None = None
    ) -> None:  # fmt: skip
        """Of a module, or of these tensors of one. `home` is host memory of the right size (pinned, for copies that run
        beside work); None makes it pageable."""
        self._slots, self.bytes = _slots(frozen_tensors(module) if isinstance(module, nn.Module) else module)
        self._device, self._lane = device, lane
        self._home = torch.zeros(self.bytes, dtype=torch.uint8) if home is None else home
        self._block: Tensor | None = None
        self._arrived: Any = None
        self._checksum: Tensor | None = None
        for slot in self._slots:  # one by one: what a tensor held before is free before the next is copied
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
        """The tensors are where they will be; `finish` has to be called before anybody reads them."""
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
        """`unchanged`: somebody has asked `changed` already, and the host need not wait for the answer."""
        if self._block is None:
            return
        self._lane.join()
        if not unchanged and self._checksum is not None and bool(self.changed()):
            self.keep()
        _point(self._slots, self._home)
        self._block = self._arrived = self._checksum = None

    def changed(self) -> Tensor:
        """On the device: whether they are not what came there. False where they have not come."""
        if self._block is None or self._checksum is None:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        _take_back(self._slots, self._block)
        return _checksum(self._block) != self._checksum

    def keep(self) -> None:
        """What they are now is what they will be."""
        assert self._block is not None
        self._home.copy_(self._block)


def _checksum(block: Tensor) -> Tensor:
    """The sum of all 8-byte words: a change that leaves it alone is not one any training makes."""
    return block[: block.numel() // 8 * 8].view(torch.int64).sum()


class HostRegistry(Protocol):
    """The two calls of the CUDA runtime that pin memory, as `torch.cuda.cudart()` has them."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> int: ...  # noqa: N802 - CUDA's name

    def cudaHostUnregister(self, pointer: int, /) -> int: ...  # noqa: N802


def pinned_bytes(size: int, registry: HostRegistry) -> Tensor:
    """Host memory of exactly this size, pinned until its last view is gone.

    torch's own pinned allocator rounds up to a power of two: of 28 GB that would waste four.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # pinning goes page by page
    kind: Any = type("PinnedBytes", (ctypes.c_uint8 * size,), {})
    view = kind.from_buffer(memory)
    pointer = ctypes.addressof(view)
    code = int(registry.cudaHostRegister(pointer, size, 0))
    if code != 0:
        raise UnifiedMemoryError(
            f"{size:,} bytes of host memory could not be pinned (CUDA error {code})\n"
            "  try  ulimit -l unlimited, or free host memory"
        )
    # Runs before the memory is unmapped: a subclass's finalizers come before its base lets go of what it views.
    weakref.finalize(view, _unpin, registry, pointer).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _unpin(registry: HostRegistry, pointer: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a copy that is still under way reads this memory
    registry.cudaHostUnregister(pointer)


# -- managed memory ---------------------------------------------------------------------------------------------------


class ManagedParking:
    """The weights lie in managed memory for good, and their pages are sent to and fro. There is only one copy of them.

    They can be used wherever the pages are: a kernel that comes early is slow, not wrong. Their preferred home stays
    the host throughout: telling the driver another one takes it longer than moving them (measured on an H200 over
    PCIe: 18 ms for 384 MiB, against 8). A prefetch that has to wait returns at once, any other keeps the host until the
    pages are sent; so each is queued behind what the device is doing.
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
        """Their pages leave beside what the device does next: whoever needs the room before gets it from the driver."""
        if self._buffer is not None and self._on_device:
            _take_back(self._slots, self._buffer.cuda())
            with self._lane.beside():
                self._buffer.prefetch("host", self._lane.handle)
            self._on_device = False


class Room(Protocol):
    def __call__(self, *, here: int, away: int) -> int:
        """Bytes the device could still take, with so many managed bytes of parked modules there, and so many not."""


def device_room(device: torch.device) -> Room:
    """Free for everyone, what torch holds without using it, and what the driver keeps for managed pages that left.

    The driver does not call the latter free: it gives it up only when somebody needs it.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)

    def room(*, here: int, away: int) -> int:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        managed = total - free - reserved - others
        kept = min(away, max(0, managed - here))
        return free + reserved - torch.cuda.memory_allocated(device) + kept

    return room
