"""The unified-memory layer of one GPU, opened from a run's options: buffers, arena, governor, statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gracetune.config.memory_options import MemoryOptions, max_split_bytes
from gracetune.hardware.allocation import CAREFUL_CAP, host_reserve
from gracetune.hardware.machine import Machine
from gracetune.hostmem.sensors import HostSensor
from gracetune.memory.arena import OverflowArena
from gracetune.memory.arena_size import ArenaRoom, ArenaSize, arena_size
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.experiment_tools import synchronize
from gracetune.memory.governor import Decision, Governor, MemoryStage, OnChange, PressureLimits
from gracetune.memory.lookahead import LookAhead, LookAheadStats, Mover
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import Migrations, Unavailable, Uvm, load
from gracetune.memory.reclaim import TorchReclaimer
from gracetune.memory.sensors import ArenaUsage, CudaMemory, DeviceSensor, Sensors, TorchCuda

if TYPE_CHECKING:
    import torch

    from gracetune.memory.lookahead import Parts

_PREFIX = "uvm."


@dataclass(frozen=True, kw_only=True)
class UvmStats:
    """A snapshot. All values except `stage`, `arena_reserved_bytes` and `arena_active_bytes` increase monotonically."""

    stage: MemoryStage = 1
    transitions: int = 0
    light_reclamations: int = 0
    hard_reclamations: int = 0
    arena_reserved_bytes: int = 0
    arena_active_bytes: int = 0
    arena_peak_bytes: int = 0
    refused: int = 0
    """Allocations of managed memory that the cap or the driver rejected."""
    hinted_bytes: int = 0
    """Bytes of buffers whose preferred location was set: caches, parked weights, `managed_empty`."""
    hints_refused: int = 0
    """Hints that the driver rejected, or that would have affected a page shared with another buffer."""
    prefetched_bytes: int = 0
    prefetch_wait_ms: float = 0.0
    """How long steps waited for data in transfer."""
    migrations: Migrations | None = None
    """Page faults and migrated bytes; None if they are not counted."""

    def by_name(self) -> dict[str, Any]:
        """All values with the prefix `uvm.`. Values that are not counted are left out."""
        values = {name: value for name, value in vars(self).items() if name != "migrations"}
        if self.migrations is not None:
            values |= {
                "gpu_page_faults": self.migrations.gpu_page_faults,
                "cpu_page_faults": self.migrations.cpu_page_faults,
                "migrated_to_device_bytes": self.migrations.to_device_bytes,
                "migrated_to_host_bytes": self.migrations.to_host_bytes,
            }
        return {_PREFIX + name: value for name, value in values.items()}


def add_uvm_stats(torch_stats: Mapping[str, Any], uvm: UvmStats) -> dict[str, Any]:
    """A copy of `torch.cuda.memory_stats()` with the `uvm.*` values added."""
    return {**torch_stats, **uvm.by_name()}


_COUNTED_WITH_ARENA: Final = (
    "they are counted only with an overflow arena, because each kernel launch takes 2 us longer"
)


@dataclass(frozen=True)
class _NoArena:
    """Stands in for the arena of a layer without one."""

    def usage(self) -> ArenaUsage:
        return ArenaUsage(0, 0)


class UnifiedMemory:
    """The unified-memory layer of a run. Call `step()` at every step boundary and `close()` at the end."""

    def __init__(
        self,
        uvm: Uvm,
        machine: Machine,
        options: MemoryOptions,
        size: ArenaSize,
        arena: OverflowArena | None,
        device: int,
        *,
        cuda: CudaMemory | None = None,
        host: HostSensor | None = None,
    ) -> None:
        """`cuda` and `host` measure GPU and main memory. The defaults read torch and /proc; tests pass models."""
        self.arena_size = size
        self.uncounted: str | None = _COUNTED_WITH_ARENA
        """Why page faults and migrations are not counted; None if they are."""
        self._uvm, self._arena = uvm, arena
        self.heap = ManagedHeap(uvm, device, partial(synchronize, device))
        self._limits = limits = PressureLimits.from_options(options, host_reserve=host_reserve(machine))
        self._device = DeviceSensor(
            cuda or TorchCuda(device), exact_below=limits.calm_level, one_pool=machine.profile.value == "integrated"
        )
        self.sensors = Sensors(host or HostSensor(machine.gpus), self._device, arena or _NoArena())
        self._governor = Governor(self.sensors, TorchReclaimer(device, self.heap), limits)
        self._cuda_device = device
        self._look_ahead_stats = LookAheadStats()
        self._moving: torch.cuda.Stream | None = None

    @classmethod
    def open(
        cls,
        options: MemoryOptions,
        machine: Machine,
        *,
        device: int = 0,
        streams: Sequence[torch.cuda.Stream] = (),
        allocator_string: str = "",
        force_oversubscription: bool = False,
        managed_elsewhere: int = 0,
        local_ranks: int = 1,
        most_arena_bytes: int | None = None,
    ) -> UnifiedMemory | Unavailable:
        """Open the layer for one GPU.

        `managed_elsewhere`: planned bytes of caches and parked weights in managed memory. `allocator_string`: the value
        of `PYTORCH_CUDA_ALLOC_CONF`, which may forbid splitting large blocks. `most_arena_bytes` limits the arena
        further.
        """
        uvm = load()
        if isinstance(uvm, Unavailable):
            return uvm
        room = ArenaRoom.for_arena(machine, device, sharers=local_ranks)
        uvm.set_managed_cap(CAREFUL_CAP if room.cap_reason and not force_oversubscription else None)
        size = ArenaSize(0, 0, "none", "no arena: use_uvm is off")
        if options.use_uvm:
            size = arena_size(
                room,
                options.uvm_oversubscription_ratio,
                other_managed=managed_elsewhere,
                force=force_oversubscription,
            )
        granted = size.bytes if most_arena_bytes is None else min(size.bytes, most_arena_bytes)
        arena = None
        if granted > 0:
            arena = OverflowArena(
                uvm,
                device,
                granted,
                options.uvm_access_pattern,
                streams=streams,
                max_split_bytes=max_split_bytes(allocator_string),
            )
        memory = cls(uvm, machine, options, size, arena, device)
        if arena is not None:
            unavailable = uvm.count_migrations()
            memory.uncounted = None if unavailable is None else str(unavailable)
        return memory

    def step(self) -> Decision:
        """Sample the memory state and react (`Governor.sample`). Raises MemoryPressure if main memory stays short."""
        return self._governor.sample()

    def on_change(self, report: OnChange) -> None:
        """Register a callback for changes of the memory stage, reclamations and changes of the arena's use."""
        self._governor.on_change = report

    @property
    def memory_is_tight(self) -> bool:
        return self._governor.state.stage == 2

    @property
    def has_arena(self) -> bool:
        """Whether PyTorch can allocate from an overflow arena. Hints and caches work without one."""
        return self._arena is not None

    def device_room(self) -> int | None:
        """GPU memory that can be allocated without coming close to memory pressure; None if unknown."""
        device = self.sensors.device_at_peak()
        return None if device is None else max(0, device.available - self._limits.calm_level(device.total))

    def moving_stream(self) -> int:
        """The CUDA stream for migrating whole buffers, separate from those of the step and the look-ahead."""
        import torch

        if self._moving is None:
            self._moving = torch.cuda.Stream(self._cuda_device)
        return int(self._moving.cuda_stream)

    def look_ahead(self, batches: Iterable[Parts], mover: Mover, *, depth: int = 2) -> LookAhead:
        """A look-ahead that reports to this layer's statistics and becomes shallower when memory is tight."""
        return LookAhead(
            batches, mover, depth=depth, memory_tight=lambda: self.memory_is_tight, stats=self._look_ahead_stats
        )

    def uvm_stats(self) -> UvmStats:
        usage = self._arena.usage() if self._arena else ArenaUsage(0, 0)
        counters = self._governor.counters
        return UvmStats(
            stage=self._governor.state.stage,
            transitions=counters.transitions,
            light_reclamations=counters.light_reclamations,
            hard_reclamations=counters.hard_reclamations,
            arena_reserved_bytes=usage.reserved,
            arena_active_bytes=usage.active,
            arena_peak_bytes=max(counters.arena_peak, usage.active),
            refused=self._uvm.total_stats().refused,
            hinted_bytes=self.heap.hints.bytes,
            hints_refused=self.heap.hints.refused,
            prefetched_bytes=self._look_ahead_stats.prefetched_bytes,
            prefetch_wait_ms=self._look_ahead_stats.wait_ms,
            migrations=self._migrations(),
        )

    def _migrations(self) -> Migrations | None:
        """The counters, or None. If a profiler takes over CUPTI, counting ends but the run continues."""
        if self.uncounted is not None:
            return None
        try:
            return self._uvm.migrations()
        except UnifiedMemoryError as error:
            self.uncounted = str(error)
            return None

    def stats(self) -> dict[str, Any]:
        """A copy of torch's memory statistics with `uvm.*` added."""
        import torch

        return add_uvm_stats(self._device.with_peaks(torch.cuda.memory_stats(self._cuda_device)), self.uvm_stats())

    @property
    def managed_bytes(self) -> int:
        """All managed memory of this process."""
        return self._uvm.total_stats().live_bytes

    def close(self) -> None:
        self._governor.on_change = lambda change: None  # so that a reference to the layer does not keep the run alive
        if self.uncounted is None:
            self.uncounted = "the layer is closed"
            with suppress(UnifiedMemoryError):  # losing the last counts must not prevent closing the arena
                self._uvm.stop_counting_migrations()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
