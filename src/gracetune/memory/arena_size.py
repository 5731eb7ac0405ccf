"""The size of the overflow arena, with the reason. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from gracetune.errors import ConfigError, Problem
from gracetune.hardware.allocation import CAREFUL_CAP, GRANULE, host_reserve
from gracetune.hardware.machine import Machine
from gracetune.units import format_bytes

OTHERS = "managed caches and parked experts"
Clamp = Literal["none", "MemAvailable", "cgroup", "managed cap", "unknown"]


@dataclass(frozen=True)
class ArenaRoom:
    """The memory of a machine: of the GPU that overflows, and of the host that takes the overflow."""

    device_total: int | None
    host_available: int | None
    """MemAvailable, without GPU memory."""
    cgroup_available: int | None
    """None if there is no limit."""
    reserve: int
    """Bytes of main memory that the arena must not use."""
    coherent: bool | None
    """Whether the link between CPU and GPU is coherent; None if the driver does not report it."""
    one_pool: bool = False
    """Whether CPU and GPU share the same physical memory."""
    sharers: int = 1
    """The number of processes on this machine that reserve an arena."""

    @classmethod
    def of(cls, machine: Machine, device: int = 0) -> ArenaRoom:
        gpu = machine.gpus[device] if device < len(machine.gpus) else None
        group = machine.host.cgroup
        # If a cgroup limit exists but its usage is unknown, the available memory is unknown too.
        unmeasured = group is not None and group.limit is not None and group.available is None
        return cls(
            device_total=gpu.memory_total if gpu else None,
            host_available=None if unmeasured else machine.host.cpu_mem_available,
            cgroup_available=group.available if group else None,
            reserve=host_reserve(machine),
            coherent=gpu.coherent_link if gpu else None,
            one_pool=bool(gpu and gpu.attributes.integrated),
        )

    @classmethod
    def for_arena(cls, machine: Machine, device: int = 0, *, sharers: int = 1) -> ArenaRoom:
        """The memory that determines the size of a run's arena; the planner uses it too.

        The reserve is larger than the host's own, so that a full arena stays above the level at which the governor
        reports pressure.
        """
        return replace(cls.of(machine, device), reserve=host_reserve(machine) * 5 // 4, sharers=sharers)

    @property
    def cap_reason(self) -> str | None:
        """Why the small cap on managed memory applies to this machine; None if it does not."""
        if self.one_pool:
            return "CPU and GPU share one pool, so there is no memory beyond the GPU's"
        if self.coherent:
            return None
        link = "has no coherent link to the CPU" if self.coherent is False else "may have no coherent link to the CPU"
        return f"the GPU {link}, and filling it beyond its memory can hang it until a reboot"


@dataclass(frozen=True)
class ArenaSize:
    """The size of an arena, and why. If `bytes` is 0, there is no arena."""

    bytes: int
    requested: int
    clamp: Clamp
    """The tightest limit that made it smaller than requested."""
    reason: str


def arena_size(room: ArenaRoom, ratio: float, *, other_managed: int = 0, force: bool = False) -> ArenaSize:
    """(ratio - 1) x the GPU's memory, limited by what this machine can provide.

    `other_managed`: bytes planned for other managed buffers. They reduce main memory and the cap.
    """
    if not (math.isfinite(ratio) and ratio > 1.0):
        key = "memory.uvm_oversubscription_ratio"
        raise ConfigError([Problem(key, str(ratio), "a number above 1.0", f"--set {key}=5.0")])
    if room.device_total is None:
        return ArenaSize(0, 0, "unknown", "no arena: it is unknown how much memory the GPU has")
    requested = int((ratio - 1.0) * room.device_total)
    formula = f"({ratio:g} - 1) x {format_bytes(room.device_total)} of GPU memory = {format_bytes(requested)}"
    if room.host_available is None:
        return ArenaSize(
            0, requested, "unknown", f"no arena: {formula}, but it is unknown how much main memory is free"
        )
    clamps = _clamps(room, other_managed, force=force)
    # min returns the first of equal limits, so the order in _clamps decides which one is reported.
    clamp, most, why = min(clamps, key=lambda entry: entry[1])
    size = min(requested, most) // GRANULE * GRANULE
    if requested <= most:
        return _whole(size, requested, formula, other_managed)
    if size == 0:
        return ArenaSize(0, requested, clamp, f"no arena: {formula} was requested, but {why}")
    return ArenaSize(size, requested, clamp, f"{format_bytes(size)} instead of {formula}: {why}")


def _whole(size: int, requested: int, formula: str, other_managed: int) -> ArenaSize:
    if size == 0:
        less = f"less than one block of {format_bytes(GRANULE)}"
        return ArenaSize(0, requested, "none", f"no arena: {formula} is {less}")
    others = f"; in addition {format_bytes(other_managed)} for {OTHERS}" if other_managed else ""
    return ArenaSize(size, requested, "none", f"as requested: {formula}{others}")


def _clamps(room: ArenaRoom, other_managed: int, *, force: bool) -> list[tuple[Clamp, int, str]]:
    """The limits of the arena: name, the bytes that remain, and an explanation."""
    kept = f"a reserve of {format_bytes(room.reserve)}"
    if room.sharers > 1:
        kept += f", divided among {room.sharers} processes,"
    if other_managed:
        kept += f" and {format_bytes(other_managed)} for {OTHERS}"
    found: list[tuple[Clamp, int, str]] = []
    if room.host_available is not None:
        left = max(0, (room.host_available - room.reserve) // room.sharers - other_managed)
        text = f"{format_bytes(room.host_available)} of main memory are available, less {kept}"
        found.append(("MemAvailable", left, text))
    if room.cgroup_available is not None:
        left = max(0, (room.cgroup_available - room.reserve) // room.sharers - other_managed)
        text = f"the control group leaves {format_bytes(room.cgroup_available)}, less {kept}"
        found.append(("cgroup", left, text))
    if room.cap_reason is not None and not force:
        left = max(0, CAREFUL_CAP - other_managed)
        text = (
            f"{room.cap_reason}: all managed memory stays under {format_bytes(CAREFUL_CAP)} "
            f"({format_bytes(other_managed)} is for {OTHERS}); --force-oversubscription lifts that"
        )
        found.append(("managed cap", left, text))
    return found
