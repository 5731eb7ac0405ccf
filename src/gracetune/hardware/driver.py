"""Queries of the CUDA driver through ctypes on libcuda, without torch, whose import takes seconds.

A `Driver` has one method, `facts()`, which returns plain data. A recording can therefore stand in for a real driver.
Functions that allocate memory are in `allocation.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Literal, Protocol

from pydantic import Field

from gracetune.errors import MachineError
from gracetune.hardware.machine import FrozenFacts

LIBRARY = "libcuda.so.1"
CUDA_ERROR_NO_DEVICE = 100
"""The `CUresult` of a working driver without a visible GPU; `CUDA_VISIBLE_DEVICES` may hide all GPUs."""


class Attribute(IntEnum):
    """The `CUdevice_attribute` values that are queried, with the names and numbers of cuda.h in CUDA 13.0."""

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33
    CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83
    CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED = 86
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES = 100
    CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST = 101
    CU_DEVICE_ATTRIBUTE_NUMA_CONFIG = 130
    CU_DEVICE_ATTRIBUTE_NUMA_ID = 131
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134


class DeviceFacts(FrozenFacts):
    """The driver's description of one GPU. Sizes are in bytes; None is unknown."""

    name: str | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    context_error: str | None = None
    """Why the GPU could not be opened."""
    attributes: dict[str, int] = Field(default_factory=dict)
    """Values by `Attribute` name. Attributes that the driver does not support are absent."""

    def attribute(self, which: Attribute) -> int | None:
        return self.attributes.get(which.name)


class DriverFacts(FrozenFacts):
    """The driver's description of itself and its GPUs. Also the format of a recording's `driver.json`."""

    status: Literal["ok", "absent", "failed"]
    detail: str
    error_code: int | None = None
    cuda_version: int | None = None
    """In the format of `cuDriverGetVersion`: 13000 is CUDA 13.0."""
    devices: tuple[DeviceFacts, ...] = ()


class Driver(Protocol):
    """A CUDA driver, or a substitute for it."""

    def facts(self, *, free_memory: bool) -> DriverFacts:
        """Describe the driver and its GPUs.

        With `free_memory`, each GPU is opened to query its free memory. This takes time and some GPU memory.
        """
        ...


class DriverCallError(MachineError):
    """A driver call returned an error."""

    def __init__(self, call: str, code: int | None, name: str) -> None:
        super().__init__(f"{call}: {name}" if code is None else f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class CudaLibrary:
    """The loaded libcuda. The result of every call is checked."""

    def __init__(self, name: str = LIBRARY) -> None:
        """Raises `OSError` with the loader's message if the library cannot be loaded."""
        self._library = ctypes.CDLL(name)

    def call(self, function: str, *arguments: object) -> None:
        """Call `function` and raise `DriverCallError` unless it returns CUDA_SUCCESS."""
        try:
            entry = self._library[function]
        except AttributeError:
            raise DriverCallError(function, None, "not in this version of libcuda") from None
        entry.restype = ctypes.c_int
        code: int = entry(*arguments)
        if code != 0:
            raise DriverCallError(function, code, self._error_name(code))

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        try:
            entry = self._library["cuGetErrorName"]
        except AttributeError:
            return "an error without a name"
        entry.restype = ctypes.c_int
        if entry(code, ctypes.byref(text)) != 0 or text.value is None:
            return "an error without a name"
        return text.value.decode(errors="replace")

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the device's primary context, which torch uses too, current on this thread inside the `with` block."""
        handle, popped = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
        try:
            self.call("cuCtxPushCurrent_v2", handle)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(popped))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device)


class CudaDriver:
    """The real driver of this machine."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library

    def facts(self, *, free_memory: bool) -> DriverFacts:
        try:
            library = CudaLibrary(self._name)
        except OSError as error:
            return DriverFacts(status="absent", detail=str(error))
        version = _driver_version(library)
        try:
            library.call("cuInit", 0)
            count = ctypes.c_int()
            library.call("cuDeviceGetCount", ctypes.byref(count))
        except DriverCallError as error:
            return DriverFacts(status="failed", detail=str(error), error_code=error.code, cuda_version=version)
        devices = tuple(_device(library, index, free_memory=free_memory) for index in range(count.value))
        return DriverFacts(status="ok", detail="ok", cuda_version=version, devices=devices)


def _driver_version(library: CudaLibrary) -> int | None:
    version = ctypes.c_int()
    try:
        # This works before cuInit, and even if cuInit fails, when the version is most useful.
        library.call("cuDriverGetVersion", ctypes.byref(version))
    except DriverCallError:
        return None
    return version.value


def _device(library: CudaLibrary, index: int, *, free_memory: bool) -> DeviceFacts:
    device = ctypes.c_int()
    try:
        library.call("cuDeviceGet", ctypes.byref(device), index)
    except DriverCallError as error:
        return DeviceFacts(context_error=str(error))
    attributes = {which.name: value for which in Attribute if (value := _attribute(library, which, device)) is not None}
    free, context_error = None, None
    # Machines with one memory pool are skipped: "free" excludes the reclaimable page cache there, and the call can fail
    # (ggml-org/llama.cpp issue 24933). The host's MemAvailable is the relevant number on them.
    if free_memory and attributes.get(Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED.name) != 1:
        free, context_error = _free_memory(library, device.value)
    return DeviceFacts(
        name=_device_name(library, device),
        memory_total=_total_memory(library, device),
        memory_free=free,
        context_error=context_error,
        attributes=attributes,
    )


def _attribute(library: CudaLibrary, which: Attribute, device: ctypes.c_int) -> int | None:
    value = ctypes.c_int()
    try:
        library.call("cuDeviceGetAttribute", ctypes.byref(value), int(which), device)
    except DriverCallError:
        return None  # an older driver returns CUDA_ERROR_INVALID_VALUE for attributes that it does not know
    return value.value


def _device_name(library: CudaLibrary, device: ctypes.c_int) -> str | None:
    text = ctypes.create_string_buffer(256)
    try:
        library.call("cuDeviceGetName", text, len(text), device)
    except DriverCallError:
        return None
    return text.value.decode(errors="replace")


def _total_memory(library: CudaLibrary, device: ctypes.c_int) -> int | None:
    total = ctypes.c_size_t()
    try:
        library.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    except DriverCallError:
        return None
    return total.value


def _free_memory(library: CudaLibrary, device: int) -> tuple[int | None, str | None]:
    """The free bytes, or why the GPU could not be opened."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        with library.context(device):
            library.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    except DriverCallError as error:
        return None, str(error)
    return free.value, None
