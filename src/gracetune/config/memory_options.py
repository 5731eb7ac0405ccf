"""The unified-memory options, under the names that the GH200 guides use. `docs/memory.md` explains each."""

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
    """Size of the arena: (ratio - 1) x the GPU's memory, limited to what the host can spare."""
    uvm_access_pattern: AccessPattern = "cpu_first"
    """Preferred location of the arena's pages."""
    uvm_stage1_threshold: OpenFraction = 0.10
    """Memory pressure begins when less than this fraction of the GPU's memory is available."""
    uvm_stage1_min_bytes: Annotated[int, Strict(), Field(ge=0, lt=2**63)] = 0
    """The same threshold in bytes; the larger of the two applies."""
    enable_uvm_hints: Flag | None = None
    """Residency hints and caches in managed memory. `true` keeps caches of type `unified_memory` in managed memory on
    every GPU that supports it; `false` uses neither; unset follows the cache types and the measured speeds."""
