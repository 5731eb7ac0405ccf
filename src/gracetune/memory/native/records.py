"""The values that go into the native shim and come out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal

HOST: Final = -1
"""A location is this or a device ordinal."""


@dataclass(frozen=True)
class Unavailable:
    """Unified memory cannot be had here. Falsy, so that `if uvm := load():` reads as it should."""

    reason: str
    remedy: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"not available: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Migrations:
    """Page faults and migrations of managed memory, as CUPTI counts them. They only ever grow."""

    to_device_bytes: int
    to_host_bytes: int
    cpu_page_faults: int
    gpu_page_faults: int


class Advice(IntEnum):
    """What the driver can be told about a range; the numbers are its own."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


@dataclass(frozen=True)
class Span:
    """Bytes of managed memory, and the GPU in whose context the driver is asked about them."""

    pointer: int
    bytes: int
    device: int

    def __post_init__(self) -> None:
        # ctypes would wrap a negative number into a huge one without a word.
        if self.pointer <= 0 or self.bytes <= 0 or self.device < 0:
            raise ValueError(f"not a span of memory: {self}")


@dataclass(frozen=True)
class SlotPolicy:
    """What an allocator slot does with every block PyTorch asks it for."""

    device: int
    cap_bytes: int
    preferred: Literal["none", "host", "device"] = "none"
    accessed_by_device: bool = False
    read_mostly: bool = False

    def __post_init__(self) -> None:
        if self.device < 0 or not 0 <= self.cap_bytes < 1 << 64:
            raise ValueError(f"not a policy for a slot: {self}")


@dataclass(frozen=True)
class SlotSymbols:
    """The arguments of `torch.cuda.memory.CUDAPluggableAllocator` for one slot."""

    library: Path
    alloc: str
    free: str


@dataclass(frozen=True)
class Failure:
    """The last thing that went wrong in an account."""

    code: int
    """Positive: the driver's. Negative: ours."""
    name: str
    function: str
    """The driver function that failed, or "" where none was asked."""


@dataclass(frozen=True)
class AccountStats:
    """Bytes and events of one account: a slot, or all managed memory together.

    Each number is right by itself; read while other threads allocate, they are not one moment's picture.
    """

    cap_bytes: int | None
    """None: no cap of its own."""
    live_bytes: int
    peak_bytes: int
    allocations: int
    frees: int
    refused_by_cap: int
    refused_by_driver: int
    refused_unusable: int
    """Asked while disabled, for another device, or for nothing."""
    failed_advises: int
    """Advice the driver would not take; the memory was handed out all the same."""
    failed_frees: int
    """The memory is still counted as live."""
    last_error: Failure | None

    @property
    def refused(self) -> int:
        return self.refused_by_cap + self.refused_by_driver + self.refused_unusable


@dataclass(frozen=True)
class RangeState:
    """What the driver was told about a range. These are requests; they do not say where a page lies now."""

    preferred: int | None
    """None: no preference, or not the same for every page."""
    last_prefetch: int | None
    accessed_by: tuple[int, ...]
    read_mostly: bool


@dataclass(frozen=True)
class Features:
    """Which optional calls this driver has."""

    advise: bool
    prefetch: bool
    location_calls: bool
    """Advise and prefetch go through the signatures of CUDA 12.2."""
    range_attributes: bool
    pointer_attributes: bool
    memory_info: bool
