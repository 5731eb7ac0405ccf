"""Memory sensors for the governor and the watchdog: GPU memory, and main memory from `hostmem.sensors`.

None means unknown; the reasons are in `notes`. The sensors only measure; decisions are made elsewhere.

torch's peak counter. What a step needs is its peak, not what is left when it ends. But torch has one peak counter per
process, and other code reads it too (`torch.cuda.max_memory_allocated()`), so it should not be reset at every step.
While even the peak of the whole run leaves more than `exact_below` available, the peak of the last step cannot change
any decision, and the counter is left alone. Below that level it is reset at every sample, so that an old peak does not
look like permanent pressure. The previous peaks are kept, and `with_peaks` restores them in a copy of torch's
statistics. One consequence: at the first sample below the level, the peak may be older than the step. That is
conservative and lasts for one sample. The very first sample of a run has no step before it, so it uses the current
allocation. A peak from loading the model or reserving the arena is then reset under the same rule.
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
    """Bytes of the overflow arena. torch's counters include them."""

    reserved: int
    active: int


class ArenaMeter(Protocol):
    """Measures the overflow arena. Called from the training thread and from the watchdog's thread."""

    def usage(self) -> ArenaUsage | None:
        """None if unknown. Without an arena, both values are 0."""
        ...


class CudaMemory(Protocol):
    """The memory counters of one GPU, from the driver and from torch's allocator."""

    def info(self) -> tuple[int, int]:
        """Free and total bytes according to the driver."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """The result of `torch.cuda.memory_stats()`."""
        ...

    def reset_peaks(self) -> None: ...

    def fraction(self) -> float:
        """The fraction of the total that torch may use; 1.0 if there is no limit."""
        ...


class TorchCuda:
    """The counters of a real GPU."""

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
    """Bytes of GPU memory still available to torch, and the total it may use."""

    available: int
    total: int
    spilled: int = 0
    """Lower bound of the arena's use at the peak: the allocation above the most that torch ever held on the device."""


def device_reading(
    *, free: int, total: int, fraction: float, reserved: int, used: int, arena: ArenaUsage
) -> DeviceReading:
    """available = min(free + reserved by torch, limit) - used by torch, all without the arena.

    torch counts the arena's blocks as its own: as reserved, as allocated while in use, and against the memory fraction,
    so they are subtracted. Spilled bytes that were freed before the sample stay in `used`, because they were needed on
    the device.
    """
    own_reserved = max(0, reserved - arena.reserved)
    own_used = max(0, used - arena.active)
    most = usable_total(total, fraction, arena.reserved)
    return DeviceReading(available=max(0, min(free + own_reserved, most) - own_used), total=most)


def usable_total(total: int, fraction: float, arena_reserved: int = 0) -> int:
    """The GPU memory that this process may hold, without the arena."""
    # At 1.0, torch enforces no limit, however large the arena is.
    return total if fraction >= 1.0 else min(total, max(0, int(fraction * total) - arena_reserved))


class DeviceSensor:
    """The memory sensor of one GPU.

    `exact_below` returns, for a total, the available bytes below which the peak of each sample matters
    (see "torch's peak counter" above).
    """

    def __init__(self, cuda: CudaMemory, *, exact_below: Callable[[int], int], one_pool: bool = False) -> None:
        self._cuda = cuda
        self._exact_below = exact_below
        self._one_pool = one_pool
        self._kept_peaks: dict[str, Any] = {}
        self._first = True

    def read(self, arena: ArenaUsage, host: HostReading) -> DeviceReading | None:
        """The reading at the peak since the last sample. May reset torch's peak counter (see above)."""
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
        """The reading at this moment. It has no side effects, so any thread may call it."""
        free, total = self._info(host)
        return None if free is None else self._reading(free, total, self._cuda.stats(), ALLOCATED, arena)

    def read_peak(self, arena: ArenaUsage, host: HostReading) -> DeviceReading | None:
        """The reading at the peak of torch's counter, without resetting it."""
        free, total = self._info(host)
        return None if free is None else self._reading(free, total, self._cuda.stats(), PEAK_ALLOCATED, arena)

    def with_peaks(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of torch's statistics with the peaks as if the counter had never been reset."""
        kept = self._kept_peaks
        return {key: max(value, kept[key]) if key in kept else value for key, value in stats.items()}

    def _info(self, host: HostReading) -> tuple[int | None, int]:
        """Free and total bytes of GPU memory."""
        free, total = self._cuda.info()
        # With one pool, the driver reports MemFree, which excludes the page cache although it can be reclaimed.
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
class MemoryReading:
    """One sample for the governor."""

    arena_active: int | None
    """The largest use of the arena since the last sample, as far as torch's counters show it."""
    device: DeviceReading | None
    host_headroom: int | None
    notes: tuple[str, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Descriptions of the values that could not be read, with reasons if known."""
        values = {
            "overflow arena": self.arena_active,
            "device memory": self.device,
            "main memory": self.host_headroom,
        }
        without_reason = [
            name
            for name, value in values.items()
            if value is None and not any(note.startswith(f"{name}:") for note in self.notes)
        ]
        return (*self.notes, *(f"{name}: unknown" for name in without_reason))


@dataclass(frozen=True)
class Vitals:
    """One sample for the watchdog: the state at this moment, possibly in the middle of a step."""

    host_headroom: int | None
    device_available: int | None
    notes: tuple[str, ...] = ()


class Sensors:
    """All sensors together. `device` is None if torch has no GPU."""

    def __init__(self, host: HostSensor, device: DeviceSensor | None, arena: ArenaMeter) -> None:
        self._host = host
        self._device = device
        self._arena = arena

    def read(self) -> MemoryReading:
        """Sample at a step boundary, from the training thread."""
        host, arena = self._host.read(), self._arena.usage()
        device = self._device.read(arena, host) if self._device is not None and arena is not None else None
        # Most of what a step spilled is freed when it ends, so the peak shows what it needs, not the current value.
        spilled = device.spilled if device is not None else 0
        return MemoryReading(
            arena_active=None if arena is None else max(arena.active, spilled),
            device=device,
            host_headroom=host.headroom,
            notes=(*host.notes, *self._device_note(arena)),
        )

    def vitals(self) -> Vitals:
        """Sample at any moment, from any thread."""
        host, arena = self._host.read(), self._arena.usage()
        device = self._device.read_now(arena, host) if self._device is not None and arena is not None else None
        return Vitals(host.headroom, None if device is None else device.available, host.notes)

    def device_at_peak(self) -> DeviceReading | None:
        """The GPU memory that was available at the peak of the last steps; None if unknown."""
        host, arena = self._host.read(), self._arena.usage()
        return self._device.read_peak(arena, host) if self._device is not None and arena is not None else None

    def _device_note(self, arena: ArenaUsage | None) -> tuple[str, ...]:
        if self._device is None:
            return ("device memory: torch has no GPU here",)
        # torch's counters include the arena. Without knowing its share, the result would be wrong.
        return ("device memory: unknown as long as the overflow arena's share of it is",) if arena is None else ()
