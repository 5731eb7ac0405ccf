"""What the governor and the watchdog go by: the GPU's memory, and what `hostmem.sensors` reads, afresh each time.

None means unknown, and `notes` say why. Nothing in here decides anything.

Torch's peak. What a step needs is its highest point, not what is left when it ends, and torch keeps one peak counter
for the whole process: restarting it at every step would take it away from everybody else who reads
`torch.cuda.max_memory_allocated()`. So it is left alone while it does not matter: as long as even the highest point of
the whole run leaves more than `exact_below` available, the last step's own peak cannot change any decision. Only under
that line is the counter restarted at every sample, so that an old peak does not look like pressure for ever. The peaks
it had are kept, and `with_peaks` puts them back into a copy of torch's statistics. One consequence: on the first sample
under the line the peak may be older than the step. That errs on the side of caution, and lasts for one sample.
The very first sample has no step before it: it goes by what is allocated then, and whatever loading the model or
reserving the arena left in the counter is restarted away under the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gracetune.hostmem.sensors import HostReading, HostSensor

RESERVED = "reserved_bytes.all.current"
ALLOCATED = "allocated_bytes.all.current"
PEAK_ALLOCATED = "allocated_bytes.all.peak"
PEAK_RESERVED = "reserved_bytes.all.peak"


@dataclass(frozen=True)
class ArenaUsage:
    """The overflow arena as torch's counters include it."""

    reserved: int
    active: int


class ArenaMeter(Protocol):
    """The overflow arena, as far as sensors care. Asked from the training thread and from the watchdog's."""

    def usage(self) -> ArenaUsage | None:
        """None: unknown. Without an arena: nothing reserved, nothing active."""
        ...


class CudaMemory(Protocol):
    """One GPU's memory as the driver and torch's allocator count it."""

    def info(self) -> tuple[int, int]:
        """The driver's free and total bytes."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """What `torch.cuda.memory_stats()` returns."""
        ...

    def reset_peaks(self) -> None: ...

    def fraction(self) -> float:
        """How much of the total torch may hold. 1.0 where nobody set a limit."""
        ...


class TorchCuda:
    """The real one."""

    def __init__(self, device: int) -> None:
        self._device = device

    def info(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info(self._device)

    def stats(self) -> Mapping[str, Any]:
        import torch

        return torch.cuda.memory_stats(self._device)

    def reset_peaks(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)

    def fraction(self) -> float:
        import torch

        return torch.cuda.get_per_process_memory_fraction(self._device)


@dataclass(frozen=True)
class DeviceReading:
    """What the GPU can still give to torch, and out of how much."""

    available: int
    total: int
    spilled: int = 0
    """At least this much was in the arena at the highest point: more than torch ever held of the device itself."""


def device_reading(
    *, free: int, total: int, fraction: float, reserved: int, used: int, arena: ArenaUsage
) -> DeviceReading:
    """Free for the driver, plus what torch holds, less what torch needs of it (`used`). The arena is in none of them.

    Torch counts the arena's blocks as its own: as reserved, as allocated when in use, and against the memory fraction.
    Spilled bytes that were freed again before the sample stay in `used`: they were wanted on the device.
    """
    own_reserved = max(0, reserved - arena.reserved)
    own_used = max(0, used - arena.active)
    most = usable_total(total, fraction, arena.reserved)
    return DeviceReading(available=max(0, min(free + own_reserved, most) - own_used), total=most)


def usable_total(total: int, fraction: float, arena_reserved: int = 0) -> int:
    """How much of the GPU this process may hold, the arena not counted."""
    # Torch reports 1.0 where no limit was set, and then it enforces none, however large the arena.
    return total if fraction >= 1.0 else min(total, max(0, int(fraction * total) - arena_reserved))


class DeviceSensor:
    """One GPU. `exact_below` gives, for a total, the availability under which a sample's own peak matters."""

    def __init__(self, cuda: CudaMemory, *, exact_below: Callable[[int], int], one_pool: bool = False) -> None:
        self._cuda = cuda
        self._exact_below = exact_below
        self._one_pool = one_pool
        self._kept_peaks: dict[str, Any] = {}
        self._first = True

    def read(self, arena: ArenaUsage, host: HostReading) -> DeviceReading | None:
        """Against the highest point since the last sample; may restart torch's peak counter (see above)."""
        free, total = self._info(host)
        if free is None:
            return None
        stats = self._cuda.stats()
        found = replace(
            self._reading(free, total, stats, PEAK_ALLOCATED, arena),
            spilled=max(0, stats.get(PEAK_ALLOCATED, 0) - (stats.get(PEAK_RESERVED, 0) - arena.reserved)),
        )
        if found.spilled or found.available <= self._exact_below(found.total):
            self._kept_peaks = self.with_peaks({key: value for key, value in stats.items() if key.endswith(".peak")})
            self._cuda.reset_peaks()
        if self._first:
            self._first = False
            return self._reading(free, total, stats, ALLOCATED, arena)
        return found

    def read_now(self, arena: ArenaUsage, host: HostReading) -> DeviceReading | None:
        """Against what is allocated at this moment. Changes nothing, so any thread may ask."""
        free, total = self._info(host)
        return None if free is None else self._reading(free, total, self._cuda.stats(), ALLOCATED, arena)

    def read_peak(self, arena: ArenaUsage, host: HostReading) -> DeviceReading | None:
        """Against the highest point of torch's counter, which is left running."""
        free, total = self._info(host)
        return None if free is None else self._reading(free, total, self._cuda.stats(), PEAK_ALLOCATED, arena)

    def with_peaks(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of torch's statistics, with every peak as if we had never restarted the counter."""
        kept = self._kept_peaks
        return {key: max(value, kept[key]) if key in kept else value for key, value in stats.items()}

    def _info(self, host: HostReading) -> tuple[int | None, int]:
        free, total = self._cuda.info()
        # With one pool the driver's "free" is MemFree, which counts the page cache as taken.
        return (host.mem_available if self._one_pool else free), total

    def _reading(self, free: int, total: int, stats: Mapping[str, Any], used: str, arena: ArenaUsage) -> DeviceReading:
        return device_reading(
            free=free,
            total=total,
            fraction=self._cuda.fraction(),
            reserved=stats.get(RESERVED, 0),  # torch's dictionary is empty until it first uses the GPU
            used=stats.get(used, 0),
            arena=arena,
        )


@dataclass(frozen=True)
class Reading:
    """One sample of everything the governor goes by."""

    arena_active: int | None
    """The most the arena held since the last sample, as far as torch's counters tell."""
    device: DeviceReading | None
    host_headroom: int | None
    notes: tuple[str, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """What could not be read, and why where a sensor said so."""
        values = {
            "overflow arena": self.arena_active,
            "device memory": self.device,
            "main memory": self.host_headroom,
        }
        silent = [
            name
            for name, value in values.items()
            if value is None and not any(note.startswith(f"{name}:") for note in self.notes)
        ]
        return (*self.notes, *(f"{name}: unknown" for name in silent))


@dataclass(frozen=True)
class Vitals:
    """What the watchdog goes by: this moment, between two steps or in the middle of one."""

    host_headroom: int | None
    device_available: int | None
    notes: tuple[str, ...] = ()


class Sensors:
    """All of them together. `device` is None where torch has no GPU."""

    def __init__(self, host: HostSensor, device: DeviceSensor | None, arena: ArenaMeter) -> None:
        self._host = host
        self._device = device
        self._arena = arena

    def read(self) -> Reading:
        """At a step boundary, from the training thread."""
        host, arena = self._host.read(), self._arena.usage()
        device = self._device.read(arena, host) if self._device is not None and arena is not None else None
        # What a step spilled is mostly freed by its end: the most it held, not what is left, is what it needs.
        spilled = device.spilled if device is not None else 0
        return Reading(
            arena_active=None if arena is None else max(arena.active, spilled),
            device=device,
            host_headroom=host.headroom,
            notes=(*host.notes, *self._device_note(arena)),
        )

    def vitals(self) -> Vitals:
        """At any moment, from any thread."""
        host, arena = self._host.read(), self._arena.usage()
        device = self._device.read_now(arena, host) if self._device is not None and arena is not None else None
        return Vitals(host.headroom, None if device is None else device.available, host.notes)

    def device_at_peak(self) -> DeviceReading | None:
        """What the GPU could still give at the highest point of the last steps; None where nobody knows."""
        host, arena = self._host.read(), self._arena.usage()
        return self._device.read_peak(arena, host) if self._device is not None and arena is not None else None

    def _device_note(self, arena: ArenaUsage | None) -> tuple[str, ...]:
        if self._device is None:
            return ("device memory: torch has no GPU here",)
        # Torch's counters include the arena; without its share they would say too much is left.
        return ("device memory: unknown as long as the overflow arena's share of it is",) if arena is None else ()
