"""CUDA managed memory for the allocation test: allocate, fill and free through the driver API.

The interface is small, so that tests can implement it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from gracetune.hardware.driver import LIBRARY, CudaLibrary

CU_MEM_ATTACH_GLOBAL = 1


class ManagedMemory(Protocol):
    """Managed memory of one open GPU. Failing calls raise `DriverError`."""

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
