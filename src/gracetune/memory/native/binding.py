"""Typed Python binding of the native shim. All result codes are checked; errors of the driver become exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Final

from gracetune.memory.errors import (
    DriverError,
    DriverTooOldError,
    ManagedCapError,
    UnifiedMemoryError,
    UsedAfterForkError,
)
from gracetune.memory.native.records import (
    AccountStats,
    Advice,
    Failure,
    Features,
    ManagedSpan,
    Migrations,
    RangeState,
    SlotPolicy,
    SlotSymbols,
    Unavailable,
)

ABI_VERSION: Final = 4
LIBRARY: Final = Path(__file__).with_name("_uvm.so")
BUILD_FAILURE: Final = "_uvm.build-failure.txt"
"""File next to the library that explains why the build at install time failed. setup.py writes it."""

_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir gracetune (in a checkout: -e . instead of the name)"
_UNLIMITED = (1 << 64) - 1
_COUNTERS = 11
_MIGRATION_COUNTERS = 4
_CUPTI: Final = ("libcupti.so.13", "libcupti.so.12")
"""File names without a path, so that the copy that torch has already loaded is found."""
_TOTAL = -1
_NOWHERE = -2
_MAX_DEVICES = 64


class Code(IntEnum):
    """Result codes of the shim (GT_ERROR_* in uvm.c). Positive codes come from the driver."""

    OK = 0
    NOT_INITIALIZED = -1
    NO_LIBRARY = -2
    MISSING_SYMBOL = -3
    UNAVAILABLE = -4
    FORKED = -5
    CAP = -6
    ARGUMENT = -7
    SLOT_DISABLED = -8
    SLOT_DEVICE = -9
    OTHER_DRIVER = -10
    CUPTI = -11


class _RangeAttribute(IntEnum):
    READ_MOSTLY = 1
    PREFERRED_LOCATION = 2
    ACCESSED_BY = 3
    LAST_PREFETCH_LOCATION = 4


class _SlotConfig(ctypes.Structure):
    _fields_ = (
        ("cap_bytes", c_uint64),
        ("enabled", c_int32),
        ("device", c_int32),
        ("preferred", c_int32),
        ("accessed_by", c_int32),
        ("read_mostly", c_int32),
        ("unused", c_int32),
    )


_WITHOUT_LOCATION = {Advice.SET_READ_MOSTLY, Advice.UNSET_READ_MOSTLY, Advice.UNSET_PREFERRED_LOCATION}
_PREFERRED = {"none": 0, "host": 1, "device": 2}
_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "gt_init": (c_int, (c_char_p, c_char_p, c_size_t)),
    "gt_slot_count": (c_int, ()),
    "gt_slot_configure": (c_int, (c_int, POINTER(_SlotConfig))),
    "gt_set_managed_cap": (c_int, (c_uint64,)),
    "gt_stats": (c_int, (c_int, POINTER(c_uint64), c_size_t)),
    "gt_managed_alloc": (c_int, (c_int, c_size_t, POINTER(c_uint64))),
    "gt_managed_free": (c_int, (c_int, c_uint64, c_size_t)),
    "gt_advise": (c_int, (c_int, c_uint64, c_size_t, c_int, c_int)),
    "gt_prefetch": (c_int, (c_int, c_uint64, c_size_t, c_int, c_void_p)),
    "gt_range_attribute": (c_int, (c_int, c_uint64, c_size_t, c_int, POINTER(c_int32), c_size_t)),
    "gt_is_managed": (c_int, (c_int, c_uint64, POINTER(c_int32))),
    "gt_pointer_range": (c_int, (c_int, c_uint64, POINTER(c_uint64), POINTER(c_uint64))),
    "gt_copy_batch": (
        c_int,
        (c_int, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t, c_void_p),
    ),
    "gt_memory_info": (c_int, (c_int, POINTER(c_uint64), POINTER(c_uint64))),
    "gt_count_migrations": (c_int, (c_char_p, c_char_p, c_size_t)),
    "gt_migrations": (c_int, (POINTER(c_uint64), c_size_t)),
    "gt_stop_counting_migrations": (c_int, ()),
    "gt_driver_version": (c_int, (POINTER(c_int),)),
    "gt_has_function": (c_int, (c_char_p,)),
    "gt_error_name": (c_char_p, (c_int,)),
    "gt_error_string": (c_char_p, (c_int,)),
    "gt_function_name": (c_char_p, (c_int,)),
    "gt_last_function": (c_char_p, ()),
}


def load(library: Path = LIBRARY, driver: str | None = None) -> Uvm | Unavailable:
    """Open the shim and initialize the CUDA driver. `driver`: a library to use instead of libcuda.so.1.

    Repeated calls are cheap and return the same state: a process has one shim, one driver and one set of counters.
    """
    shim = _open_shim(library)
    if isinstance(shim, Unavailable):
        return shim
    detail = ctypes.create_string_buffer(1024)
    code = shim.gt_init(driver.encode() if driver is not None else None, detail, len(detail))
    message = detail.value.decode(errors="replace")
    if code == Code.OK:
        return Uvm(library, shim)
    if code == Code.FORKED:
        raise UsedAfterForkError
    if code == Code.OTHER_DRIVER:
        raise UnifiedMemoryError(
            f"this process already uses the driver library {message}; it cannot switch to {driver}"
        )
    return _no_driver(code, message)


def _open_shim(library: Path) -> ctypes.CDLL | Unavailable:
    if not library.is_file():
        return _not_built(library)
    try:
        shim = ctypes.CDLL(str(library))
        found = int(shim.gt_abi_version())
    except OSError as error:
        return Unavailable(f"the native library does not load on this machine ({error})", f"run: {_REBUILD}")
    except AttributeError:
        return Unavailable(f"{library.name} is not gracetune's native library", f"run: {_REBUILD}")
    if found != ABI_VERSION:
        reason = f"the native library is of another version (interface {found}, this gracetune needs {ABI_VERSION})"
        return Unavailable(reason, f"run: {_REBUILD}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(shim, name)  # unlike shim[name], this returns the same object each time
        function.restype, function.argtypes = result, arguments
    return shim


def _not_built(library: Path) -> Unavailable:
    note = library.with_name(BUILD_FAILURE)
    if note.is_file():
        reason = note.read_text(encoding="utf-8", errors="replace").strip()
        return Unavailable(reason, f"install gcc and run: {_REBUILD}")
    return Unavailable("the native library has not been built", f"with gcc installed, run: {_REBUILD}")


def _no_driver(code: int, message: str) -> Unavailable:
    if code == Code.NO_LIBRARY:
        return Unavailable(f"no CUDA driver ({message})", "install it, or start the container with --gpus all")
    if code == Code.MISSING_SYMBOL:
        return Unavailable(f"the CUDA driver library has no {message}", "install a current NVIDIA driver")
    name = message or "unnamed error"
    return Unavailable(f"the CUDA driver does not start: cuInit failed with {name} ({code})", "run: gracetune doctor")


class Uvm:
    """The loaded shim. Its state belongs to the process; this object has none of its own."""

    def __init__(self, path: Path, shim: ctypes.CDLL) -> None:
        self.path = path
        self._shim = shim
        self.slot_count: int = shim.gt_slot_count()
        self.features = self._find_features()

    # -- allocator slots ----------------------------------------------------------------------------------------------

    def slot_symbols(self, slot: int) -> SlotSymbols:
        if not 0 <= slot < self.slot_count:
            raise ValueError(f"no slot {slot}: there are {self.slot_count}")
        return SlotSymbols(self.path, f"gt_slot{slot}_alloc", f"gt_slot{slot}_free")

    def configure_slot(self, slot: int, policy: SlotPolicy) -> None:
        """Enable a slot with this policy. Blocks allocated earlier keep their advice."""
        self._configure(slot, policy, enabled=True)

    def disable_slot(self, slot: int) -> None:
        """Reject further allocations. Existing blocks stay valid and can still be freed."""
        self._configure(slot, SlotPolicy(device=0, cap_bytes=0), enabled=False)

    def _configure(self, slot: int, policy: SlotPolicy, *, enabled: bool) -> None:
        config = _SlotConfig(
            cap_bytes=policy.cap_bytes,
            enabled=enabled,
            device=policy.device,
            preferred=_PREFERRED[policy.preferred],
            accessed_by=policy.accessed_by_device,
            read_mostly=policy.read_mostly,
        )
        self._check(self._shim.gt_slot_configure(slot, byref(config)))

    def slot_stats(self, slot: int) -> AccountStats:
        if not 0 <= slot < self.slot_count:
            raise ValueError(f"no slot {slot}: there are {self.slot_count}")
        return self._stats(slot)

    # -- the whole process --------------------------------------------------------------------------------------------

    def set_managed_cap(self, cap_bytes: int | None) -> None:
        """Limit the managed memory of this process (slots and direct allocations together). None means no limit."""
        if cap_bytes is not None and not 0 <= cap_bytes < _UNLIMITED:
            raise ValueError(f"not a number of bytes: {cap_bytes}")
        self._check(self._shim.gt_set_managed_cap(_UNLIMITED if cap_bytes is None else cap_bytes))

    def total_stats(self) -> AccountStats:
        return self._stats(_TOTAL)

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of a GPU, according to the driver."""
        free, total = c_uint64(), c_uint64()
        self._check(self._shim.gt_memory_info(device, byref(free), byref(total)))
        return free.value, total.value

    def driver_version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, such as (13, 0)."""
        version = c_int()
        self._check(self._shim.gt_driver_version(byref(version)))
        return version.value // 1000, version.value % 1000 // 10

    def count_migrations(self, libraries: Sequence[str] = _CUPTI) -> Unavailable | None:
        """Start counting page faults and migrations of managed memory with CUPTI. Returns the reason if impossible.

        While counting is on, each kernel launch takes about 2 microseconds longer (`docs/memory.md`).
        """
        reasons = []
        for library in libraries:
            detail = ctypes.create_string_buffer(1024)
            code = self._shim.gt_count_migrations(library.encode(), detail, len(detail))
            if code == Code.OK:
                return None
            if code == Code.FORKED:
                raise UsedAfterForkError
            reasons.append(detail.value.decode(errors="replace") or f"code {code}")
        return Unavailable(
            f"CUPTI: {'; '.join(reasons)}", "torch's CUDA wheels contain it; else pip install nvidia-cuda-cupti"
        )

    def migrations(self) -> Migrations:
        """The counters since `count_migrations`. This does not synchronize the GPU."""
        values = (c_uint64 * _MIGRATION_COUNTERS)()
        self._check(self._shim.gt_migrations(values, _MIGRATION_COUNTERS))
        return Migrations(*values)

    def stop_counting_migrations(self) -> None:
        self._check(self._shim.gt_stop_counting_migrations())

    # -- managed memory ------------------------------------------------------------------------------------------------

    def allocate(self, size: int, device: int) -> ManagedSpan:
        """Allocate uninitialized managed memory without any advice."""
        if not 0 < size < _UNLIMITED:
            raise ValueError(f"cannot allocate {size} bytes")
        pointer = c_uint64()
        code = self._shim.gt_managed_alloc(device, size, byref(pointer))
        if code == Code.CAP:
            total = self.total_stats()
            raise ManagedCapError(requested=size, live=total.live_bytes, cap=total.cap_bytes or 0)
        self._check(code)
        return ManagedSpan(pointer.value, size, device)

    def free(self, span: ManagedSpan) -> None:
        """Free a span that `allocate` returned."""
        self._check(self._shim.gt_managed_free(span.device, span.pointer, span.bytes))

    def advise(self, span: ManagedSpan, advice: Advice, location: int | None = None) -> None:
        """Give advice. All advice except read-mostly and UNSET_PREFERRED_LOCATION needs a `location`."""
        if location is None:
            if advice not in _WITHOUT_LOCATION:
                raise ValueError(f"{advice.name} needs a location")
            location = span.device  # the driver ignores it
        self._check(self._shim.gt_advise(span.device, span.pointer, span.bytes, advice, location))

    def prefetch(self, span: ManagedSpan, location: int, stream: int) -> None:
        """Enqueue the migration on `stream` (a CUDA stream handle of `span.device`; 0 is the default stream)."""
        self._check(self._shim.gt_prefetch(span.device, span.pointer, span.bytes, location, stream))

    def copy_batch(
        self, device: int, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Enqueue copies to the device: target address, source address and bytes of each. Their order is undefined.

        The sources must be page-locked host memory or managed memory on the host. They must be complete now and must
        not change or be freed before the stream has executed the copies. Sizes must not be 0.
        """
        count = len(targets)
        if not count == len(sources) == len(sizes):
            raise ValueError(f"{count} targets, {len(sources)} sources and {len(sizes)} sizes")
        addresses, lengths = c_uint64 * count, c_size_t * count
        self._check(
            self._shim.gt_copy_batch(
                device, addresses(*targets), addresses(*sources), lengths(*sizes), count, stream or None
            )
        )

    def range_state(self, span: ManagedSpan) -> RangeState:
        return RangeState(
            preferred=_somewhere(self._attribute(span, _RangeAttribute.PREFERRED_LOCATION)[0]),
            last_prefetch=_somewhere(self._attribute(span, _RangeAttribute.LAST_PREFETCH_LOCATION)[0]),
            accessed_by=tuple(
                one for one in self._attribute(span, _RangeAttribute.ACCESSED_BY, _MAX_DEVICES) if one != _NOWHERE
            ),
            read_mostly=self._attribute(span, _RangeAttribute.READ_MOSTLY)[0] == 1,
        )

    def is_managed(self, pointer: int, device: int) -> bool:
        managed = c_int32()
        self._check(self._shim.gt_is_managed(device, pointer, byref(managed)))
        return bool(managed.value)

    def allocation_of(self, pointer: int, device: int) -> ManagedSpan:
        """The allocation that contains `pointer`."""
        start, size = c_uint64(), c_uint64()
        self._check(self._shim.gt_pointer_range(device, pointer, byref(start), byref(size)))
        return ManagedSpan(start.value, size.value, device)

    # ------------------------------------------------------------------------------------------------------------------

    def _attribute(self, span: ManagedSpan, attribute: _RangeAttribute, count: int = 1) -> list[int]:
        values = (c_int32 * count)()
        self._check(self._shim.gt_range_attribute(span.device, span.pointer, span.bytes, attribute, values, count))
        return list(values)

    def _stats(self, account: int) -> AccountStats:
        values = (c_uint64 * _COUNTERS)()
        self._check(self._shim.gt_stats(account, values, _COUNTERS))
        cap, live, peak, allocations, frees, by_cap, by_driver, unusable, advises, failed_frees, error = values
        return AccountStats(
            cap_bytes=None if cap == _UNLIMITED else cap,
            live_bytes=live,
            peak_bytes=peak,
            allocations=allocations,
            frees=frees,
            refused_by_cap=by_cap,
            refused_by_driver=by_driver,
            refused_unusable=unusable,
            failed_advises=advises,
            failed_frees=failed_frees,
            last_error=self._failure(error),
        )

    def _failure(self, word: int) -> Failure | None:
        if word == 0:
            return None
        code, function = c_int32(word >> 32).value, c_int32(word & 0xFFFFFFFF).value
        name = self._text(self._shim.gt_error_name, code) if code > 0 else Code(code).name
        return Failure(code, name, self._text(self._shim.gt_function_name, function))

    def _find_features(self) -> Features:
        def has(name: str) -> bool:
            found: int = self._shim.gt_has_function(name.encode())
            self._check(min(found, 0))
            return found == 1

        return Features(
            advise=has("cuMemAdvise_v2") or has("cuMemAdvise"),
            prefetch=has("cuMemPrefetchAsync_v2") or has("cuMemPrefetchAsync"),
            location_calls=has("cuMemAdvise_v2") and has("cuMemPrefetchAsync_v2"),
            range_attributes=has("cuMemRangeGetAttribute"),
            pointer_attributes=has("cuPointerGetAttribute"),
            memory_info=has("cuMemGetInfo_v2"),
        )

    def _check(self, code: int) -> None:
        if code == Code.OK:
            return
        function = self._shim.gt_last_function().decode()
        if code > 0:
            name, text = self._text(self._shim.gt_error_name, code), self._text(self._shim.gt_error_string, code)
            raise DriverError(function, code, name, text)
        if code == Code.FORKED:
            raise UsedAfterForkError
        if code == Code.UNAVAILABLE:
            raise DriverTooOldError(function)
        if code == Code.ARGUMENT:
            raise ValueError("invalid device, location, range or size passed to the native shim")
        raise UnifiedMemoryError(f"the native shim returned {Code(code).name}")

    @staticmethod
    def _text(ask: Callable[[int], bytes], number: int) -> str:
        return ask(number).decode(errors="replace")


def _somewhere(location: int) -> int | None:
    return None if location == _NOWHERE else location
