"""The unified-memory options, under the names people already use for them (`docs/memory.md` explains each)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from gracetune.config.base import Flag, OpenFraction, Section

AccessPattern = Literal["gpu_first", "balanced", "cpu_first"]


class MemoryOptions(Section):
    """Overflow arena, governor and residency hints."""

    use_uvm: Flag = False
    """Reserve the overflow arena in managed memory and run the two-stage governor."""
    uvm_oversubscription_ratio: Annotated[float, Strict(), Field(gt=1.0, le=1000)] = 5.0
    """The arena is (ratio - 1) x the GPU's memory, clamped to what the host can spare."""
    uvm_access_pattern: AccessPattern = "cpu_first"
    """Where the arena's pages prefer to live."""
    uvm_stage1_threshold: OpenFraction = 0.10
    """Memory pressure begins when less than this fraction of the GPU's memory is available."""
    uvm_stage1_min_bytes: Annotated[int, Strict(), Field(ge=0, lt=2**63)] = 0
    """The same floor in bytes; the larger of both counts."""
    enable_uvm_hints: Flag | None = None
    """Residency hints and caches in managed memory. `true` takes managed slabs for caches of type `unified_memory` on
    every GPU that can; `false` takes none and gives no hint; unset follows the cache types and the measured speeds."""
