"""The `uvm.*` statistics, which extend torch's memory statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gracetune.memory.governor import MemoryStage
from gracetune.memory.native import Migrations

PREFIX = "uvm."


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
        return {PREFIX + name: value for name, value in values.items()}


def merged(torch_stats: Mapping[str, Any], uvm: UvmStats) -> dict[str, Any]:
    """A copy of `torch.cuda.memory_stats()` with the `uvm.*` values added."""
    return {**torch_stats, **uvm.by_name()}
