"""Queues of a device for copies and updates, and the ring of slots through which streamed states pass.

    ring.load(chunk)    copies the chunk's state into a slot, beside everything else
    ring.take(chunk)    the slot, once the update queue may read it
    ring.release(chunk) copies the state back, and frees the slot for a later chunk

On a CPU the queues do everything at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gracetune.models.parking import pinned_bytes
from gracetune.optim.state_chunks import Chunk
from gracetune.units import GIB

REGION = 8 * GIB
"""Pinned memory is allocated in regions of about this size."""


class Queue(Protocol):
    """Work of a device that runs in order, beside that of other queues."""

    def running(self) -> AbstractContextManager[object]:
        """Inside, work goes to this queue."""

    def mark(self) -> Any:
        """A mark after the work queued so far."""

    def wait(self, mark: Any) -> None:
        """Make work that is queued from now on wait for a mark of another queue. None: wait for nothing."""

    def settle(self) -> None:
        """Make the host wait for all work."""


class CudaQueue:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        if mark is not None:
            self._stream.wait_event(mark)

    def settle(self) -> None:
        self._stream.synchronize()


class InlineQueue:
    """The queue of a device without streams."""

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> None: ...

    def wait(self, mark: Any) -> None: ...

    def settle(self) -> None: ...


def new_queue(device: torch.device) -> Queue:
    return CudaQueue(torch.cuda.Stream(device)) if device.type == "cuda" else InlineQueue()


def current_queue(device: torch.device) -> Queue:
    return CudaQueue(torch.cuda.current_stream(device)) if device.type == "cuda" else InlineQueue()


NewMemory = Callable[[int], Tensor]
"""Allocates host memory of this many bytes."""


def host_memory(device: torch.device) -> NewMemory:
    """Host memory from which `device` copies at the full rate of its link."""
    if device.type != "cuda":
        return lambda size: torch.zeros(size, dtype=torch.uint8)
    registry = torch.cuda.cudart()
    return lambda size: pinned_bytes(size, registry)


def host_blocks(chunks: Sequence[Chunk], new_memory: NewMemory) -> dict[int, Tensor]:
    """A block of host memory for each chunk, by its number. Memory is allocated in large regions."""
    blocks: dict[int, Tensor] = {}
    waiting = deque(chunks)
    while waiting:
        members, size = [waiting.popleft()], 0
        size = members[0].size
        while waiting and size + waiting[0].size <= REGION:
            members.append(waiting.popleft())
            size += members[-1].size
        parts = new_memory(size).split([chunk.size for chunk in members])
        blocks |= {chunk.number: part for chunk, part in zip(members, parts, strict=True)}
    return blocks


@dataclass(eq=False)
class _Slot:
    memory: Tensor
    arrived: Any = None
    """The mark after which the state is in the slot."""
    freed: Any = None
    """The mark after which the slot may be overwritten."""


class SlotRing:
    """Slots are used in turns. A chunk's state is loaded at most once before it is released or dropped."""

    def __init__(self, chunks: Sequence[Chunk], homes: Mapping[int, Tensor], device: torch.device, slots: int) -> None:
        self._homes = homes
        size = max((chunk.size for chunk in chunks), default=0)
        count = min(slots, len(chunks))
        self._free = deque(
            _Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(count)
        )  # fmt: skip
        self._loaded: dict[int, _Slot] = {}
        self._saved: dict[int, Any] = {}
        """Marks after which the home of a chunk holds its newest state."""
        self._into, self._out = new_queue(device), new_queue(device)

    @property
    def room(self) -> int:
        """Slots that are not loaded. Some of them may still be copied out."""
        return len(self._free)

    @property
    def memory(self) -> list[Tensor]:
        return [slot.memory for slot in (*self._free, *self._loaded.values())]

    def holds(self, chunk: Chunk) -> bool:
        return chunk.number in self._loaded

    def load(self, chunk: Chunk) -> None:
        if self.holds(chunk):
            return
        slot = self._free.popleft()
        self._into.wait(slot.freed)
        self._into.wait(self._saved.get(chunk.number))
        with self._into.running():
            slot.memory[: chunk.size].copy_(self._homes[chunk.number], non_blocking=True)
        slot.arrived = self._into.mark()
        self._loaded[chunk.number] = slot

    def take(self, chunk: Chunk, queue: Queue) -> Tensor:
        """The state of a loaded chunk. Work that is queued in `queue` from now on finds it complete."""
        slot = self._loaded[chunk.number]
        queue.wait(slot.arrived)
        return slot.memory[: chunk.size]

    def release(self, chunk: Chunk, done: Any) -> None:
        """Copy the state back after the mark `done`, and let other chunks have the slot then."""
        slot = self._loaded.pop(chunk.number)
        self._out.wait(done)
        with self._out.running():
            self._homes[chunk.number].copy_(slot.memory[: chunk.size], non_blocking=True)
        slot.freed = self._saved[chunk.number] = self._out.mark()
        self._free.append(slot)

    def drop(self) -> None:
        """Forget what is loaded and not updated: the homes hold it too."""
        for slot in self._loaded.values():
            slot.freed = slot.arrived
            self._free.append(slot)
        self._loaded.clear()

    def settle(self) -> None:
        """Make the host wait until the homes hold every newest state."""
        self._into.settle()
        self._out.settle()
