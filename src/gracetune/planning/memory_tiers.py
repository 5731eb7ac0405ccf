"""The memory tiers of a machine, and how much of each a plan may use. Pure, except `free_on_disk`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gracetune.hardware.allocation import host_reserve
from gracetune.hardware.machine import Machine
from gracetune.units import GIB, MIB, format_bytes

TierName = Literal["device", "host", "pool", "disk"]

HEADROOM = 0.05
"""Share of the GPU's memory that plans leave free, for errors of the estimate and unusual fragmentation."""
CONTEXT_BYTES = 640 * MIB
"""CUDA context, libraries and their workspaces, which torch's counters do not include."""
FRAGMENTATION = 0.02
"""Share of torch's memory lost to fragmentation."""
FOREIGN = 2 * GIB
"""If less than this is in use before a run, it is the driver's own, not another program's."""


@dataclass(frozen=True)
class Tier:
    """One kind of memory. `budget` is the part of `capacity` a plan may use; None if unknown or not limited."""

    name: TierName
    label: str
    capacity: int | None
    budget: int | None
    why: str


@dataclass(frozen=True)
class Tiers:
    """All of a machine's memory. `missing` names the facts without which no verdict is possible."""

    tiers: tuple[Tier, ...]
    compute: TierName
    """Where computing happens."""
    store: TierName
    """Where host data lives."""
    parking: TierName
    """Where idle weights wait: host memory, or the disk they came from."""
    has_gpu: bool
    missing: tuple[str, ...] = ()

    def __getitem__(self, name: TierName) -> Tier:
        return next(tier for tier in self.tiers if tier.name == name)


def free_on_disk(folder: str) -> int | None:
    """Free bytes where a run will write, read from the nearest existing parent folder; None if unknown."""
    existing = Path(folder).expanduser().absolute()
    try:
        while not existing.is_dir() and existing != existing.parent:
            existing = existing.parent
        return shutil.disk_usage(existing).free
    except OSError:
        return None


def tiers_of(machine: Machine, disk_free: int | None = None, *, gpus: int = 1) -> Tiers:
    """The tiers for a plan on the first `gpus` GPUs; the smallest of them counts.

    `disk_free` is known only on the machine that has the run's folder.
    """
    disk = Tier("disk", "disk", disk_free, disk_free, "free now" if disk_free is not None else "not asked")
    profile = machine.profile.value
    if profile == "cpu":
        host = _host(machine, "main memory")
        return Tiers((host, disk), compute="host", store="host", parking="disk", has_gpu=False, missing=_missing(host))
    if profile == "integrated":
        pool = _host(machine, "shared memory (CPU and GPU)", "pool")
        return Tiers((pool, disk), compute="pool", store="pool", parking="disk", has_gpu=True, missing=_missing(pool))
    linked = profile == "superchip"
    host = _host(machine, "CPU memory (coherent link)" if linked else "main memory (pinned)")
    devices = [_device(machine, at) for at in range(max(1, min(gpus, len(machine.gpus))))]
    device = min(devices, key=_known_budget)
    missing = _missing(device, devices.index(device)) + _missing(host)
    return Tiers((device, host, disk), compute="device", store="host", parking="host", has_gpu=True, missing=missing)


def _missing(tier: Tier, gpu: int = 0) -> tuple[str, ...]:
    """The field of the machine report whose absence leaves the tier's budget unknown."""
    if tier.budget is not None:
        return ()
    return (f"gpus[{gpu}].memory_total" if tier.name == "device" else "host.cpu_mem_available",)


def _known_budget(tier: Tier) -> int:
    """A sort key that puts unknown budgets first: one unknown GPU makes the plan unknown."""
    return -1 if tier.budget is None else tier.budget


def _device(machine: Machine, at: int) -> Tier:
    gpu = machine.gpus[at] if machine.gpus else None
    total = gpu.memory_total if gpu else None
    if gpu is None or total is None:
        return Tier("device", "GPU memory", capacity=None, budget=None, why="the driver does not say how much there is")
    usable, why = total, f"{HEADROOM:.0%} kept free"
    free = gpu.memory_free
    # On a superchip the kernel may use GPU memory for page cache and gives it back. Elsewhere it belongs to others.
    if free is not None and machine.profile.value == "discrete" and total - free > FOREIGN:
        usable = free
        why += f" of the {format_bytes(free)} other programs leave"
    return Tier("device", "GPU memory", total, int(usable * (1 - HEADROOM)), why)


def _host(machine: Machine, label: str, name: TierName = "host") -> Tier:
    headroom, capacity = machine.host.headroom, machine.host.memory_limit
    if headroom is None:
        return Tier(name, label, capacity, budget=None, why="it is unknown how much is available")
    reserve = host_reserve(machine)
    budget = max(0, headroom - reserve)
    group = machine.host.cgroup
    limited = group is not None and group.available is not None and group.available <= headroom
    source = "the control group leaves" if limited else "available"
    return Tier(name, label, capacity, budget, f"{source} {format_bytes(headroom)}, reserve {format_bytes(reserve)}")
