"""Arguments and results of the native shim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal

HOST: Final = -1
"""The location of host memory. All other locations are device ordinals."""


@dataclass(frozen=True)
class Unavailable:
    """Unified memory is not available. Falsy, so that `if uvm := load():` works."""

    reason: str
    remedy: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"not available: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Migrations:
    """Page faults and migrations of managed memory, counted by CUPTI. The values increase monotonically."""

    to_device_bytes: int
    to_host_bytes: int
    cpu_page_faults: int
    gpu_page_faults: int


class Advice(IntEnum):
    """Advice for a memory range, with the driver's values (CUmem_advise)."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


@dataclass(frozen=True)
class ManagedSpan:
    """A range of managed memory, and the GPU whose context is used for driver calls on it."""

    pointer: int
    bytes: int
    device: int

    def __post_init__(self) -> None:
        # ctypes would silently convert a negative number to a huge unsigned one.
        if self.pointer <= 0 or self.bytes <= 0 or self.device < 0:
            raise ValueError(f"not a valid memory range: {self}")


@dataclass(frozen=True)
class SlotPolicy:
    """How an allocator slot treats each block that PyTorch allocates."""

    device: int
    cap_bytes: int
    preferred: Literal["none", "host", "device"] = "none"
    accessed_by_device: bool = False
    read_mostly: bool = False

    def __post_init__(self) -> None:
        if self.device < 0 or not 0 <= self.cap_bytes < 1 << 64:
            raise ValueError(f"not a valid slot policy: {self}")


@dataclass(frozen=True)
class SlotSymbols:
    """The arguments of `torch.cuda.memory.CUDAPluggableAllocator` for one slot."""

    library: Path
    alloc: str
    free: str


@dataclass(frozen=True)
class Failure:
    """The last error of an account."""

    code: int
    """Positive codes come from the driver, negative ones from the shim."""
    name: str
    function: str
    """The driver function that failed, or "" if none was called."""


@dataclass(frozen=True)
class AccountStats:
    """Counters of one account: a slot, or all managed memory of the process.

    Each value is correct by itself. If other threads allocate meanwhile, the values are not a consistent snapshot.
    """

    cap_bytes: int | None
    """None if the account has no cap."""
    live_bytes: int
    peak_bytes: int
    allocations: int
    frees: int
    refused_by_cap: int
    refused_by_driver: int
    refused_unusable: int
    """Requests to a disabled slot, for another device, for zero bytes, or in a forked process."""
    failed_advises: int
    """Advice that the driver rejected. The memory was allocated nevertheless."""
    failed_frees: int
    """Frees that failed. Their memory still counts as live."""
    last_error: Failure | None

    @property
    def refused(self) -> int:
        return self.refused_by_cap + self.refused_by_driver + self.refused_unusable


@dataclass(frozen=True)
class RangeState:
    """The advice that the driver has for a range. It does not show where the pages are now."""

    preferred: int | None
    """None if there is no preference, or if it differs between pages."""
    last_prefetch: int | None
    accessed_by: tuple[int, ...]
    read_mostly: bool


@dataclass(frozen=True)
class Features:
    """The optional functions that this driver supports."""

    advise: bool
    prefetch: bool
    location_calls: bool
    """Whether advise and prefetch use the signatures of CUDA 12.2."""
    range_attributes: bool
    pointer_attributes: bool
    memory_info: bool
