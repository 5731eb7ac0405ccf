"""How large the overflow arena may be, and why not larger. Pure."""

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
class Room:
    """What there is to overflow from, and into."""

    device_total: int | None
    host_available: int | None
    """MemAvailable, without GPU memory."""
    cgroup_available: int | None
    """None: no limit."""
    reserve: int
    """Of main memory; the arena never counts on it."""
    coherent: bool | None
    """Whether CPU and GPU share memory coherently over their link; None: the driver does not say."""
    one_pool: bool = False
    """CPU and GPU allocate from the same chips."""
    sharers: int = 1
    """Processes of this machine that each reserve an arena."""

    @classmethod
    def of(cls, machine: Machine, device: int = 0) -> Room:
        gpu = machine.gpus[device] if device < len(machine.gpus) else None
        group = machine.host.cgroup
        # A limit we cannot measure ourselves against is not the same as none: then what is free is unknown.
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
    def for_arena(cls, machine: Machine, device: int = 0, *, sharers: int = 1) -> Room:
        """What a run sizes its arena by, and so what a plan counts on. The reserve is larger than the host's own: a
        full arena must not sit at the very line where the governor reports pressure."""
        return replace(cls.of(machine, device), reserve=host_reserve(machine) * 5 // 4, sharers=sharers)

    @property
    def careful(self) -> str | None:
        """Why all managed memory together stays under the small cap here; None where it need not."""
        if self.one_pool:
            return "CPU and GPU share one pool, so there is no memory beyond the GPU's"
        if self.coherent:
            return None
        said = "has no coherent link to the CPU" if self.coherent is False else "may have no coherent link to the CPU"
        return f"the GPU {said}, and filling it beyond its memory can hang it until a reboot"


@dataclass(frozen=True)
class ArenaSize:
    """`bytes` 0 means: no arena."""

    bytes: int
    requested: int
    clamp: Clamp
    """What kept it from being as large as requested; of several, the tightest."""
    reason: str


def arena_size(room: Room, ratio: float, *, other_managed: int = 0, force: bool = False) -> ArenaSize:
    """(ratio - 1) x the GPU's memory, as far as this machine can back it.

    `other_managed` is what managed buffers are promised besides: they take their share of main memory and of the cap.
    """
    if not (math.isfinite(ratio) and ratio > 1.0):
        key = "memory.uvm_oversubscription_ratio"
        raise ConfigError([Problem(key, str(ratio), "a number above 1.0", f"--set {key}=5.0")])
    if room.device_total is None:
        return ArenaSize(0, 0, "unknown", "no arena: it is unknown how much memory the GPU has")
    requested = int((ratio - 1.0) * room.device_total)
    asked = f"({ratio:g} - 1) x {format_bytes(room.device_total)} of GPU memory = {format_bytes(requested)}"
    if room.host_available is None:
        return ArenaSize(0, requested, "unknown", f"no arena: {asked}, but it is unknown how much main memory is free")
    clamps = _clamps(room, other_managed, force=force)
    # min keeps the first of equals, so the order of _clamps is the order in which they are blamed.
    clamp, most, why = min(clamps, key=lambda entry: entry[1])
    size = min(requested, most) // GRANULE * GRANULE
    if requested <= most:
        return _whole(size, requested, asked, other_managed)
    if size == 0:
        return ArenaSize(0, requested, clamp, f"no arena: {asked} was asked for, but {why}")
    return ArenaSize(size, requested, clamp, f"{format_bytes(size)} instead of {asked}: {why}")


def _whole(size: int, requested: int, asked: str, other_managed: int) -> ArenaSize:
    if size == 0:
        less = f"less than one block of {format_bytes(GRANULE)}"
        return ArenaSize(0, requested, "none", f"no arena: {asked} is {less}")
    beside = f"; beside it {format_bytes(other_managed)} for {OTHERS}" if other_managed else ""
    return ArenaSize(size, requested, "none", f"as asked: {asked}{beside}")


def _clamps(room: Room, other_managed: int, *, force: bool) -> list[tuple[Clamp, int, str]]:
    """What limits the arena: its name, the bytes it leaves, and the sentence that says so."""
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
    if room.careful is not None and not force:
        left = max(0, CAREFUL_CAP - other_managed)
        text = (
            f"{room.careful}: all managed memory stays under {format_bytes(CAREFUL_CAP)} "
            f"({format_bytes(other_managed)} is for {OTHERS}); --force-oversubscription lifts that"
        )
        found.append(("managed cap", left, text))
    return found
