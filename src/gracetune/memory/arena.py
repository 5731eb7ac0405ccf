"""The overflow arena: managed memory from which PyTorch takes a block when the GPU has none left.

PyTorch never calls a last-resort pool's allocator, it only takes blocks that are already in the pool. So we reserve
them beforehand; managed addresses are lazy, and a page costs nothing until it is written. A block belongs to the
stream it was reserved on, and requests of up to 1 MiB look for blocks of their own kind.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from gracetune.config.memory_options import AccessPattern
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.native import SlotPolicy, Uvm
from gracetune.memory.sensors import ArenaUsage
from gracetune.units import MIB, format_bytes

if TYPE_CHECKING:
    import torch

SMALL_SEGMENT: Final = 2 * MIB
"""How much PyTorch asks for when a request of up to 1 MiB finds no block."""
SMALL_REQUEST: Final = 1 * MIB
LARGE_UNIT: Final = 2 * MIB
SMALLEST_LARGE: Final = 20 * MIB
"""What PyTorch asks for when a request above 1 MiB is small: a block below that cannot be reserved."""
_SMALL_SHARE: Final = 1 / 32
_MOST_SMALL: Final = 256 * MIB
SLOT: Final = 0
"""The native allocator slot the arena uses."""


@dataclass(frozen=True)
class ArenaShape:
    """What is reserved on one stream."""

    large_blocks: tuple[int, ...]
    small_segments: int

    @property
    def bytes(self) -> int:
        return sum(self.large_blocks) + self.small_segments * SMALL_SEGMENT


def arena_shape(size: int, max_split_bytes: int | None = None) -> ArenaShape:
    """Divide `size` into one large block, which PyTorch splits as it needs, and room for small requests.

    With `max_split_size_mb` PyTorch serves a smaller request only from blocks below that size: then the arena is made
    of such blocks. Less than a `SMALLEST_LARGE` at the end is left out, because PyTorch would ask for that much.
    """
    small_segments = int(min(size * _SMALL_SHARE, _MOST_SMALL)) // SMALL_SEGMENT
    large = (size - small_segments * SMALL_SEGMENT) // LARGE_UNIT * LARGE_UNIT
    block = large
    if max_split_bytes is not None:
        block = max(SMALLEST_LARGE, min(large, (max_split_bytes - 1) // LARGE_UNIT * LARGE_UNIT))
    blocks = [block] * (large // block) if block else []
    rest = large - sum(blocks)
    pieces = (*blocks, rest)
    return ArenaShape(tuple(piece for piece in pieces if piece >= SMALLEST_LARGE), small_segments)


def slot_policy(pattern: AccessPattern, device: int, cap_bytes: int) -> SlotPolicy:
    """Where the arena's pages prefer to live. `gpu_first` also takes the driver's protection from thrashing away."""
    if pattern == "gpu_first":
        return SlotPolicy(device, cap_bytes, preferred="device", accessed_by_device=True)
    if pattern == "cpu_first":
        return SlotPolicy(device, cap_bytes, preferred="host", accessed_by_device=True)
    return SlotPolicy(device, cap_bytes, preferred="none", accessed_by_device=True)


class OverflowArena:
    """Reserved managed blocks in a last-resort `MemPool`. Close it when nothing allocated from it is alive."""

    def __init__(
        self,
        uvm: Uvm,
        device: int,
        size: int,
        pattern: AccessPattern,
        *,
        streams: Sequence[torch.cuda.Stream] = (),
        max_split_bytes: int | None = None,
    ) -> None:
        import torch

        self.device, self.pattern = device, pattern
        self._uvm = uvm
        wanted = [torch.cuda.default_stream(device), *streams]
        self.shape = arena_shape(size // len(wanted), max_split_bytes)
        uvm.configure_slot(SLOT, slot_policy(pattern, device, self.shape.bytes * len(wanted)))
        symbols = uvm.slot_symbols(SLOT)
        # A pool belongs to the device that is current when it is made.
        with torch.cuda.device(device):
            allocator = _allocator(str(symbols.library), symbols.alloc, symbols.free)
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(allocator.allocator(), use_on_oom=True)
            try:
                for stream in wanted:
                    self._reserve(stream)
            except torch.cuda.OutOfMemoryError as error:
                self.close()
                raise UnifiedMemoryError(_why_not_reserved(device, self.shape.bytes * len(wanted))) from error
        # Every reserved block was allocated for a moment; nobody means that when they ask for a run's peak.
        torch.cuda.reset_peak_memory_stats(device)

    def _reserve(self, stream: torch.cuda.Stream) -> None:
        """Allocate the blocks and let go of them: the pool keeps them as free blocks of this stream."""
        import torch

        device = f"cuda:{self.device}"
        assert self._pool is not None
        small = [SMALL_REQUEST] * (self.shape.small_segments * (SMALL_SEGMENT // SMALL_REQUEST))
        # On torch 2.11 and 2.12 this scope counts as a graph capture of the whole device: keep it short.
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool, self.device):
            held = [torch.empty(size, dtype=torch.uint8, device=device) for size in (*self.shape.large_blocks, *small)]
        del held

    def usage(self) -> ArenaUsage:
        pool = self._pool  # another thread may close the arena
        if pool is None:
            return ArenaUsage(0, 0)
        segments = pool.snapshot(include_traces=False) if _snapshots_can_be_short() else pool.snapshot()
        active = sum(int(segment["active_size"]) for segment in segments)
        return ArenaUsage(sum(int(segment["total_size"]) for segment in segments), active)

    def close(self) -> None:
        """Give the memory back. Tensors that still live in the arena keep their segment alive until they die."""
        import torch

        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()
        self._uvm.disable_slot(SLOT)


@cache
def _allocator(library: str, alloc: str, free: str) -> torch.cuda.memory.CUDAPluggableAllocator:
    """One per slot, for the life of the process: a closed pool's blocks are freed through it when their tensors die."""
    import torch

    return torch.cuda.memory.CUDAPluggableAllocator(library, alloc, free)


@cache
def _snapshots_can_be_short() -> bool:
    """From torch 2.13 a snapshot can leave out the allocation history."""
    import torch

    return "include_traces" in inspect.signature(torch.cuda.MemPool.snapshot).parameters


def _why_not_reserved(device: int, size: int) -> str:
    import torch

    fraction = torch.cuda.get_per_process_memory_fraction(device)
    cause = (
        f"PyTorch may use {fraction:.0%} of the GPU, and the arena counts towards that" if fraction < 1 else "refused"
    )
    return f"no room to reserve an overflow arena of {format_bytes(size)}: {cause}\n  try  a smaller ratio or fraction"
