"""The overflow arena: managed memory that PyTorch allocates from when the GPU's memory is full.

The arena is a `MemPool` with `use_on_oom`. PyTorch never calls the allocator of such a pool; it only uses blocks that
are already in it. The blocks are therefore reserved in advance. That is cheap: managed pages take no memory until they
are first written. A block serves only the stream it was reserved on, and PyTorch keeps separate blocks for requests of
up to 1 MiB.
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
"""The block size that PyTorch allocates for requests of up to 1 MiB."""
SMALL_REQUEST: Final = 1 * MIB
"""The largest request that such a block serves."""
LARGE_UNIT: Final = 2 * MIB
"""The sizes of large blocks are multiples of this."""
SMALLEST_LARGE: Final = 20 * MIB
"""The smallest block that PyTorch allocates for larger requests. Smaller blocks cannot be reserved."""
_SMALL_SHARE: Final = 1 / 32
_MOST_SMALL: Final = 256 * MIB
"""Small requests get this share of the arena, and at most this many bytes."""
SLOT: Final = 0
"""The native allocator slot of the arena."""


@dataclass(frozen=True)
class ArenaShape:
    """The blocks to reserve on one stream, in bytes and as a number of `SMALL_SEGMENT`s."""

    large_blocks: tuple[int, ...]
    small_segments: int

    @property
    def bytes(self) -> int:
        return sum(self.large_blocks) + self.small_segments * SMALL_SEGMENT


def arena_shape(size: int, max_split_bytes: int | None = None) -> ArenaShape:
    """Divide `size` into one large block, which PyTorch splits as needed, and blocks for small requests.

    With `max_split_size_mb`, PyTorch does not split blocks of that size or more, so the arena consists of smaller
    blocks. A rest below `SMALLEST_LARGE` is left out, because it cannot be reserved.
    """
    small_segments = int(min(size * _SMALL_SHARE, _MOST_SMALL)) // SMALL_SEGMENT
    large = (size - small_segments * SMALL_SEGMENT) // LARGE_UNIT * LARGE_UNIT
    block = large
    if max_split_bytes is not None:
        block = max(SMALLEST_LARGE, min(large, (max_split_bytes - 1) // LARGE_UNIT * LARGE_UNIT))
    blocks = [block] * (large // block) if block else []
    rest = large - sum(blocks)
    return ArenaShape(tuple(size for size in (*blocks, rest) if size >= SMALLEST_LARGE), small_segments)


def slot_policy(pattern: AccessPattern, device: int, cap_bytes: int) -> SlotPolicy:
    """The preferred location of the arena's pages. `gpu_first` also disables the driver's protection from thrashing."""
    if pattern == "gpu_first":
        return SlotPolicy(device, cap_bytes, preferred="device", accessed_by_device=True)
    if pattern == "cpu_first":
        return SlotPolicy(device, cap_bytes, preferred="host", accessed_by_device=True)
    return SlotPolicy(device, cap_bytes, preferred="none", accessed_by_device=True)


class OverflowArena:
    """Reserved managed blocks in a last-resort `MemPool`. Close it when no tensor allocated from it is alive."""

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
        # A pool belongs to the device that is current when it is created.
        with torch.cuda.device(device):
            allocator = _allocator(str(symbols.library), symbols.alloc, symbols.free)
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(allocator.allocator(), use_on_oom=True)
            try:
                for stream in wanted:
                    self._reserve(stream)
            except torch.cuda.OutOfMemoryError as error:
                self.close()
                raise UnifiedMemoryError(_why_not_reserved(device, self.shape.bytes * len(wanted))) from error
        # Reserving allocated every block for a moment. Reset the peak so that it shows the run's own use.
        torch.cuda.reset_peak_memory_stats(device)

    def _reserve(self, stream: torch.cuda.Stream) -> None:
        """Allocate and free the blocks. The pool keeps them as free blocks of this stream."""
        import torch

        device = f"cuda:{self.device}"
        assert self._pool is not None
        small = [SMALL_REQUEST] * (self.shape.small_segments * (SMALL_SEGMENT // SMALL_REQUEST))
        # On torch 2.11 and 2.12 this scope counts as a graph capture of the whole device: keep it short.
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool, self.device):
            held = [torch.empty(size, dtype=torch.uint8, device=device) for size in (*self.shape.large_blocks, *small)]
        del held

    def usage(self) -> ArenaUsage:
        pool = self._pool  # a local reference, because another thread may close the arena
        if pool is None:
            return ArenaUsage(0, 0)
        segments = pool.snapshot(include_traces=False) if _can_omit_traces() else pool.snapshot()
        active = sum(int(segment["active_size"]) for segment in segments)
        return ArenaUsage(sum(int(segment["total_size"]) for segment in segments), active)

    def close(self) -> None:
        """Free the arena. A tensor that still uses it keeps its segment until the tensor is freed."""
        import torch

        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()
        self._uvm.disable_slot(SLOT)


@cache
def _allocator(library: str, alloc: str, free: str) -> torch.cuda.memory.CUDAPluggableAllocator:
    """One allocator per slot for the whole process. Blocks of a closed pool are freed through it later."""
    import torch

    return torch.cuda.memory.CUDAPluggableAllocator(library, alloc, free)


@cache
def _can_omit_traces() -> bool:
    """Whether snapshots can leave out the allocation history (torch 2.13 and later)."""
    import torch

    return "include_traces" in inspect.signature(torch.cuda.MemPool.snapshot).parameters


def _why_not_reserved(device: int, size: int) -> str:
    import torch

    fraction = torch.cuda.get_per_process_memory_fraction(device)
    cause = (
        f"PyTorch may use {fraction:.0%} of the GPU, and the arena counts towards that" if fraction < 1 else "refused"
    )
    return f"no room to reserve an overflow arena of {format_bytes(size)}: {cause}\n  try  a smaller ratio or fraction"
