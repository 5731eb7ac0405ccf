"""Asks the CUDA driver, by ctypes on libcuda and without torch (importing torch costs seconds, libcuda milliseconds).

A `Driver` answers one question, `facts()`, with plain data, so that a recording can answer it as well as a real
driver does. What touches memory lives in `managed.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Literal, Protocol

from pydantic import Field

from gracetune.errors import MachineError
from gracetune.hardware.machine import Facts

LIBRARY = "libcuda.so.1"
CUDA_ERROR_NO_DEVICE = 100
"""The `CUresult` of a healthy driver that finds no GPU (or whose GPUs `CUDA_VISIBLE_DEVICES` hides)."""


class Attribute(IntEnum):
    """The `CUdevice_attribute` values we ask for, named and numbered as in cuda.h of CUDA 13.0."""

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


class DeviceFacts(Facts):
    """What the driver says about one GPU."""

    name: str | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    context_error: str | None = None
    attributes: dict[str, int] = Field(default_factory=dict)
    """`Attribute` name -> value; an attribute this driver does not know is absent."""

    def attribute(self, which: Attribute) -> int | None:
        return self.attributes.get(which.name)


class DriverFacts(Facts):
    """Everything a driver says about itself and its GPUs; also the format of a recording's `driver.json`."""

    status: Literal["ok", "absent", "failed"]
    detail: str
    error_code: int | None = None
    cuda_version: int | None = None
    """As `cuDriverGetVersion` gives it: 13000 is CUDA 13.0."""
    devices: tuple[DeviceFacts, ...] = ()


class Driver(Protocol):
    """Anything that can say what the CUDA driver of a machine says."""

    def facts(self, *, free_memory: bool) -> DriverFacts:
        """`free_memory` opens each GPU to ask how much of its memory is free, which costs time and some of it."""
        ...


class DriverError(MachineError):
    """A driver call came back with an error."""

    def __init__(self, call: str, code: int | None, name: str) -> None:
        super().__init__(f"{call}: {name}" if code is None else f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class CudaLibrary:
    """libcuda, loaded; every call is checked."""

    def __init__(self, name: str = LIBRARY) -> None:
        """Raises `OSError` with the loader's own words where there is no such library."""
        self._library = ctypes.CDLL(name)

    def call(self, function: str, *arguments: object) -> None:
        """Call `function` and raise `DriverError` unless it returns CUDA_SUCCESS."""
        try:
            entry = self._library[function]
        except AttributeError:
            raise DriverError(function, None, "this libcuda does not have it") from None
        entry.restype = ctypes.c_int
        code: int = entry(*arguments)
        if code != 0:
            raise DriverError(function, code, self._error_name(code))

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        try:
            entry = self._library["cuGetErrorName"]
        except AttributeError:
            return "an unnamed error"
        entry.restype = ctypes.c_int
        if entry(code, ctypes.byref(text)) != 0 or text.value is None:
            return "an error without a name"
        return text.value.decode(errors="replace")

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context, current on this thread while the block runs (the one torch uses as well)."""
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
        except DriverError as error:
            return DriverFacts(status="failed", detail=str(error), error_code=error.code, cuda_version=version)
        devices = tuple(_device(library, index, free_memory=free_memory) for index in range(count.value))
        return DriverFacts(status="ok", detail="ok", cuda_version=version, devices=devices)


def _driver_version(library: CudaLibrary) -> int | None:
    version = ctypes.c_int()
    try:
        # Works before cuInit and even where cuInit fails, which is when one most wants to know it.
        library.call("cuDriverGetVersion", ctypes.byref(version))
    except DriverError:
        return None
    return version.value


def _device(library: CudaLibrary, index: int, *, free_memory: bool) -> DeviceFacts:
    device = ctypes.c_int()
    try:
        library.call("cuDeviceGet", ctypes.byref(device), index)
    except DriverError as error:
        return DeviceFacts(context_error=str(error))
    attributes = {which.name: value for which in Attribute if (value := _attribute(library, which, device)) is not None}
    free, context_error = None, None
    # One-pool machines are not asked: there "free" leaves out everything the page cache holds, and the call has been
    # seen to fail (ggml-org/llama.cpp issue 24933). The host's MemAvailable is the number that counts on them.
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
    except DriverError:
        return None  # an older driver answers CUDA_ERROR_INVALID_VALUE to attributes it has never heard of
    return value.value


def _device_name(library: CudaLibrary, device: ctypes.c_int) -> str | None:
    text = ctypes.create_string_buffer(256)
    try:
        library.call("cuDeviceGetName", text, len(text), device)
    except DriverError:
        return None
    return text.value.decode(errors="replace")


def _total_memory(library: CudaLibrary, device: ctypes.c_int) -> int | None:
    total = ctypes.c_size_t()
    try:
        library.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    except DriverError:
        return None
    return total.value


def _free_memory(library: CudaLibrary, device: int) -> tuple[int | None, str | None]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        with library.context(device):
            library.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    except DriverError as error:
        return None, str(error)
    return free.value, None
