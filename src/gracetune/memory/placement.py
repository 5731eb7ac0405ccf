"""The placement of each kind of data, by machine profile. Pure: role and profile in, placement and reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from gracetune.config.run_config import RunConfig
from gracetune.hardware.machine import ProfileName
from gracetune.units import format_bytes

Role = Literal["hot_weights", "activations", "cold_weights", "optimizer_state", "latent_cache", "text_cache"]
MemoryKind = Literal["device", "managed_host", "managed_device", "pinned_host", "shared_host", "host"]

TEXT_ON_DEVICE_SHARE = 0.02
"""Text embeddings that take at most this fraction of a superchip's GPU memory are kept there: every step reads them."""


@dataclass(frozen=True)
class Hints:
    """Whether a run uses residency hints and managed memory for caches, and why."""

    on: bool
    reason: str
    requested: bool = False
    """`memory.enable_uvm_hints` is true: use managed memory even if it was measured to be slower."""


FOLLOW_CACHES: Final = Hints(True, "a cache type is unified_memory")


def hints_of(config: RunConfig) -> Hints:
    """`memory.enable_uvm_hints` decides; if it is unset, the cache types do."""
    switch = config.memory.enable_uvm_hints
    if switch is not None:
        return Hints(switch, f"memory.enable_uvm_hints is {str(switch).lower()}", requested=switch)
    if "unified_memory" in (config.cache.vae_cache_type, config.cache.text_cache_type):
        return FOLLOW_CACHES
    return Hints(False, "no cache type is unified_memory")


@dataclass(frozen=True)
class MemoryPlacement:
    """The place of some data, whether it must be moved to the GPU before use, and the reason."""

    kind: MemoryKind
    moved_before_use: bool
    reason: str


_HOT = MemoryPlacement("device", False, "used in every step")
_ONE_POOL = MemoryPlacement("device", False, "one pool: there is nowhere else to move it")

# Columns: kind of memory, whether data is moved before use, reason.
_TABLE: dict[tuple[Role, ProfileName], MemoryPlacement] = {
    ("cold_weights", "superchip"): MemoryPlacement(
        "managed_host", True, "idle most of the time; prefetched over the coherent link"
    ),
    ("cold_weights", "discrete"): MemoryPlacement(
        "pinned_host", True, "idle most of the time; copied from pinned memory"
    ),
    ("cold_weights", "integrated"): _ONE_POOL,
    # Streamed state (`optimizer.state`) is placed by the optimizer itself (`optim.state_streams`).
    ("optimizer_state", "superchip"): MemoryPlacement("device", False, "read and written in every step"),
    ("optimizer_state", "discrete"): MemoryPlacement("device", False, "read and written in every step"),
    ("optimizer_state", "integrated"): _ONE_POOL,
    ("latent_cache", "superchip"): MemoryPlacement(
        "managed_host", True, "large and read once an epoch; gathered over the link"
    ),
    ("latent_cache", "discrete"): MemoryPlacement(
        "pinned_host", True, "large and read once an epoch; copied from pinned memory"
    ),
    ("latent_cache", "integrated"): MemoryPlacement("shared_host", False, "one pool: read in place"),
    ("text_cache", "superchip"): MemoryPlacement("managed_host", True, "larger than 2 % of the GPU's memory"),
    ("text_cache", "discrete"): MemoryPlacement("pinned_host", True, "copied from pinned memory"),
    ("text_cache", "integrated"): MemoryPlacement("shared_host", False, "one pool: read in place"),
}


def choose_placement(
    role: Role, profile: ProfileName, *, size: int = 0, device_bytes: int | None = None, local_ranks: int = 1
) -> MemoryPlacement:
    """The placement of one role. Managed memory has no IPC, so several local ranks share pinned pages instead."""
    if profile == "cpu":
        return MemoryPlacement("host", False, "no GPU: everything is in host memory")
    if role in ("hot_weights", "activations"):
        return _HOT
    chosen = _TABLE[role, profile]
    if role.endswith("_cache") and local_ranks > 1 and chosen.kind in ("managed_host", "pinned_host"):
        return MemoryPlacement("shared_host", True, f"one copy for {local_ranks} ranks, registered with each")
    fits_device = device_bytes is not None and size <= device_bytes * TEXT_ON_DEVICE_SHARE
    if role == "text_cache" and profile == "superchip" and fits_device:
        return MemoryPlacement("managed_device", False, "small, and read in every step")
    return chosen


WAITED_SHARE: Final = 0.05
"""Fraction of the compute time. If steps wait longer than this for data, changing the placement is worthwhile."""


@dataclass(frozen=True)
class StepWaits:
    """Waiting and compute time over a number of consecutive steps."""

    waited_ms: float
    step_ms: float
    is_deepest: bool
    """The look-ahead has its largest depth, so more depth cannot reduce the waiting."""

    @property
    def are_long(self) -> bool:
        return self.is_deepest and self.waited_ms > WAITED_SHARE * self.step_ms

    def __str__(self) -> str:
        return f"steps of {self.step_ms:.0f} ms in total waited {self.waited_ms:.0f} ms for data"


@dataclass(frozen=True)
class Rehoming:
    """The new preferred location of a managed cache, and why."""

    home: Literal["host", "device"]
    reason: str


def rehome(
    home: Literal["host", "device"],
    waits: StepWaits,
    *,
    size: int,
    room: int | None,
    memory_tight: bool,
    was_sent_back: bool,
) -> Rehoming | None:
    """Decide whether a managed cache should move; None if it should stay. Pure.

    `home`: its preferred location now. `room`: GPU bytes that can be allocated without coming close to memory pressure.
    A cache that had to move back because memory was tight stays in host memory, so it cannot oscillate.
    """
    if home == "device":
        return Rehoming("host", "memory is tight") if memory_tight else None
    if was_sent_back or memory_tight or not waits.are_long or room is None or size > room:
        return None
    return Rehoming("device", f"{waits}, and its {format_bytes(size)} fit into {format_bytes(room)} of free GPU memory")
