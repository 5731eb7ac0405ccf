"""The allocation test: allocate managed memory, fill it with the GPU, read some of it with the CPU, and free it.

Filling more managed memory than a PCIe card has can hang the driver until the machine is rebooted. Therefore
`plan_allocation` first chooses a size from the Machine alone. It exceeds the GPU's memory only if the driver reports a
coherent link or the user forces it. Main memory is protected by the plan, and again before each chunk is filled.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from gracetune.errors import ConfigError, Problem
from gracetune.hardware.driver import LIBRARY, CudaLibrary, DriverCallError
from gracetune.hardware.machine import Gpu, Machine
from gracetune.units import GIB, MIB, format_bytes

DEFAULT_SCALE = 1.5
CAREFUL_CAP = 4 * GIB
"""The limit for managed memory on a machine without a coherent link, unless the user forces more."""
GRANULE = 2 * MIB
"""Sizes are multiples of this."""
CHUNK = GIB
"""Bytes that are filled between two readings of main memory."""
PATTERN = 0x5A

Status = Literal["success", "reduced", "failed", "skipped"]


@dataclass(frozen=True)
class AllocationPlan:
    """The size of the test, and why. If `size` is 0, the test does not run."""

    scale: float
    """Requested size as a multiple of the GPU's memory."""
    requested: int
    size: int
    reason: str


@dataclass(frozen=True)
class AllocationResult:
    """The result of the test. The JSON has the field names of older scripts, where a GB is 2**30 bytes."""

    requested_scale: float
    status: Status
    reason: str
    error: str | None = None
    allocated: int = 0
    allocation_seconds: float | None = None
    fill_seconds: float | None = None

    @property
    def fill_rate(self) -> float | None:
        """Bytes per second."""
        return self.allocated / self.fill_seconds if self.fill_seconds else None

    def to_json(self) -> dict[str, object]:
        ran = self.status in ("success", "reduced")
        seconds, rate = self.allocation_seconds, self.fill_rate
        return {
            "requested_scale": self.requested_scale,
            "status": self.status,
            "reason": self.reason,
            "error": self.error,
            "allocated_gb": round(self.allocated / GIB, 2) if ran else None,
            "allocation_time_s": round(seconds, 3) if seconds is not None else None,
            "fill_bandwidth_gbps": round(rate / GIB, 2) if rate is not None else None,
        }


def skipped(scale: float, reason: str) -> AllocationResult:
    return AllocationResult(requested_scale=scale, status="skipped", reason=reason)


def check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and 0 < scale <= 1000):
        flag = "--oversubscription-scale"
        raise ConfigError([Problem(flag, str(scale), "a number above 0, at most 1000", f"{flag} {DEFAULT_SCALE}")])


def host_reserve(machine: Machine) -> int:
    """The main memory that plans, caches, staging and this test leave free: max(a tenth, min(4 GiB, a quarter)).

    These are fractions of the machine's memory, or of the cgroup's limit if that is lower. If neither is known,
    the reserve is 4 GiB.
    """
    total = machine.host.memory_limit
    return 4 * GIB if total is None else max(total // 10, min(4 * GIB, total // 4))


def host_floor(machine: Machine) -> int:
    """Below this much free main memory, a run saves and stops, and no run starts."""
    return host_reserve(machine) // 2


def plan_allocation(machine: Machine, scale: float, *, force: bool) -> AllocationPlan:
    """Decide the size of the test on the first GPU. Pure."""
    check_scale(scale)
    if not machine.gpus:
        return AllocationPlan(scale, 0, 0, "no GPU")
    gpu = machine.gpus[0]
    if gpu.memory_total is None:
        return AllocationPlan(scale, 0, 0, "the driver does not report how much memory the GPU has")
    requested = int(gpu.memory_total * scale)
    cap, why = _cap(machine, gpu, force=force)
    if cap is None:
        return AllocationPlan(scale, requested, 0, why)
    size = min(requested, cap) // GRANULE * GRANULE
    if size <= 0:
        return AllocationPlan(scale, requested, 0, f"no memory available: {why}")
    if requested <= cap:
        return AllocationPlan(scale, requested=size, size=size, reason="as requested")
    return AllocationPlan(scale, requested, size, why)


def _cap(machine: Machine, gpu: Gpu, *, force: bool) -> tuple[int | None, str]:
    """The maximum size on this machine, and an explanation. None means that the test must not run."""
    blocker = _blocker(gpu)
    if blocker:
        return None, blocker
    spare = _spare(machine)
    if spare is None:
        return None, "it is unknown how much main memory is free"
    if spare == 0:
        return 0, f"main memory is down to its reserve of {format_bytes(host_reserve(machine))}"
    if gpu.attributes.integrated:
        return _one_pool_cap(spare, force=force)
    if gpu.memory_free is None:
        return None, "the driver does not report how much of the GPU's memory is free"
    careful = min(CAREFUL_CAP, gpu.memory_free // 2, spare)
    if not gpu.attributes.concurrent_managed_access:
        return careful, "the GPU cannot hold more managed memory than it has (no concurrent managed access)"
    # Managed memory may be in GPU memory and in main memory, so their sum is the physical limit.
    physical = gpu.memory_free + spare
    if gpu.coherent_link:
        return physical, f"all that is free on the GPU, and in main memory above a reserve: {format_bytes(physical)}"
    if force:
        return physical, f"forced, up to what is free on the GPU and in main memory: {format_bytes(physical)}"
    link = "reports a link that is not coherent" if gpu.coherent_link is False else "does not report a coherent link"
    return careful, f"the driver {link}; exceeding the GPU's memory can hang it until a reboot"


def _blocker(gpu: Gpu) -> str | None:
    if gpu.context_error:
        return f"the driver could not open the GPU: {gpu.context_error}"
    if gpu.attributes.managed_memory is None:
        return "the driver does not report whether it supports managed memory"
    return None if gpu.attributes.managed_memory else "the driver cannot allocate managed memory on this system"


def _spare(machine: Machine) -> int | None:
    headroom = machine.host.headroom
    return None if headroom is None else max(0, headroom - host_reserve(machine))


def _one_pool_cap(spare: int, *, force: bool) -> tuple[int, str]:
    # On such a machine there is no memory beyond the GPU's, and using all of it hangs the machine.
    if force:
        return spare, f"forced, up to the available memory of the shared pool: {format_bytes(spare)}"
    return min(CAREFUL_CAP, spare), "CPU and GPU share one pool, so there is no memory beyond the GPU's"


def run_allocation(
    plan: AllocationPlan,
    driver: ManagedDriver,
    *,
    headroom: Callable[[], int | None],
    reserve: int,
    chunk: int = CHUNK,
) -> AllocationResult:
    """Run the test. `headroom` returns the main memory available now; filling stops when it is below `reserve`."""
    if plan.size <= 0:
        return skipped(plan.scale, plan.reason)
    try:
        with driver.open(0) as memory:
            return _allocate_fill_check(plan, memory, headroom, reserve, chunk)
    except DriverCallError as error:
        return AllocationResult(plan.scale, "failed", plan.reason, error=str(error))
    except OSError as error:  # libcuda was removed after the probe
        return AllocationResult(plan.scale, "failed", plan.reason, error=str(error))


def _allocate_fill_check(
    plan: AllocationPlan, memory: ManagedMemory, headroom: Callable[[], int | None], reserve: int, chunk: int
) -> AllocationResult:
    started = time.perf_counter()
    address = memory.allocate(plan.size)
    allocated = time.perf_counter()
    try:
        filled, seconds, left = _fill(plan.size, memory, address, headroom, reserve, chunk)
        wrong = _wrong_byte(memory, address, filled)
    finally:
        memory.free(address)
    if wrong is not None:
        return AllocationResult(plan.scale, "failed", plan.reason, error=wrong)
    reason = plan.reason
    if filled < plan.size:
        cause = (
            "how much main memory is left is unknown" if left is None else f"{format_bytes(left)} of main memory left"
        )
        reason = f"stopped at {format_bytes(filled)}: {cause}; {format_bytes(reserve)} have to stay free"
        if filled == 0:
            return skipped(plan.scale, reason)
    status: Status = "reduced" if filled < plan.requested else "success"
    return AllocationResult(
        plan.scale, status, reason, allocated=filled, allocation_seconds=allocated - started, fill_seconds=seconds
    )


def _fill(
    size: int, memory: ManagedMemory, address: int, headroom: Callable[[], int | None], reserve: int, chunk: int
) -> tuple[int, float, int | None]:
    """Fill in chunks, and check the headroom before each, in case memory fills up faster than planned.

    Returns the filled bytes, the seconds and the last headroom.
    """
    filled, seconds = 0, 0.0
    left: int | None = None
    while filled < size:
        left = headroom()
        if left is None or left < reserve:
            break
        count = min(chunk, size - filled)
        started = time.perf_counter()
        memory.fill(address + filled, PATTERN, count)
        seconds += time.perf_counter() - started
        filled += count
    return filled, seconds, left


def _wrong_byte(memory: ManagedMemory, address: int, filled: int) -> str | None:
    """Check with the CPU the first, middle and last byte that the GPU wrote. Returns a description of an error."""
    for offset in (0, filled // 2, filled - 1) if filled else ():
        found = memory.peek(address + offset)
        if found != PATTERN:
            return f"byte {offset} reads 0x{found:02x} on the CPU after the GPU wrote 0x{PATTERN:02x}"
    return None


# -- managed memory of the driver; tests implement the two protocols ---------------------------------------------------


CU_MEM_ATTACH_GLOBAL = 1


class ManagedMemory(Protocol):
    """Managed memory of one open GPU. Failing calls raise `DriverCallError`."""

    def allocate(self, size: int) -> int: ...

    def fill(self, address: int, value: int, size: int) -> None:
        """Write `value` to every byte with the GPU, and wait for completion."""
        ...

    def peek(self, address: int) -> int:
        """Read one byte with the CPU."""
        ...

    def free(self, address: int) -> None: ...


class ManagedDriver(Protocol):
    """A driver that can open a GPU for managed allocations."""

    def open(self, device: int) -> AbstractContextManager[ManagedMemory]: ...


class CudaManagedMemory:
    """Managed memory of a real GPU. Valid while its context is current."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(CU_MEM_ATTACH_GLOBAL)
        self._library.call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size), flags)
        return address.value

    def fill(self, address: int, value: int, size: int) -> None:
        self._library.call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size))
        self._library.call("cuCtxSynchronize")

    def peek(self, address: int) -> int:
        return ctypes.c_ubyte.from_address(address).value

    def free(self, address: int) -> None:
        self._library.call("cuMemFree_v2", ctypes.c_uint64(address))


class CudaManagedDriver:
    """libcuda of this machine."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library

    @contextmanager
    def open(self, device: int) -> Iterator[ManagedMemory]:
        library = CudaLibrary(self._name)
        library.call("cuInit", 0)
        handle = ctypes.c_int()
        library.call("cuDeviceGet", ctypes.byref(handle), device)
        with library.context(handle.value):
            yield CudaManagedMemory(library)
