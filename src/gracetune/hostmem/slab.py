"""Slabs of main memory: one large block, mapped whole. A slab never moves.

Main memory that several local ranks read is a memfd: a file that exists only in memory, mapped whole by each. One
process alone takes anonymous memory, which comes in large pages. For a GPU either is registered with the driver in one
piece (page-locked), so that copies from it run by themselves. `memory.managed_slab` has the same of managed memory.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from gracetune.errors import Problem
from gracetune.hostmem.errors import HostMemoryError
from gracetune.hostmem.numa import NodeChoice, bind
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can cut the file off under a reader, which would kill it."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""
_MAPPED: Final = 2
"""cudaHostRegisterMapped: the GPU can read it where it lies."""


class Slab(Protocol):
    host: Tensor
    """Its bytes for the CPU: what is loaded goes here."""
    view: Tensor
    """Its bytes for whoever gathers batches: the same, or a CUDA view of them."""
    notes: tuple[str, ...]
    """What should be so and is not: memory that was not page-locked, or not bound to its NUMA nodes."""

    def settle(self) -> None:
        """Everything is loaded, by whichever rank does it."""

    def close(self) -> None:
        """Views that are still held stay valid."""


class MemorySlab:
    """Main memory, mapped whole. `own` and `shared` make one, `join` maps one that another rank made.

    It is page-locked when it is full: the driver would have every page filled with zeros first, by one thread, where
    loading has all of its threads do it.
    """

    def __init__(self, mapping: mmap.mmap, file: io.FileIO | None, device: int | None, *, in_place: bool) -> None:
        """`in_place`: the GPU reads it where it lies, so `view` becomes a CUDA tensor over the same bytes."""
        import torch

        self.file = file
        """What other ranks can map; None for memory of this process alone."""
        self.host = self.view = torch.frombuffer(mapping, dtype=torch.uint8)
        self.notes: tuple[str, ...] = ()
        self._device, self._is_locked, self._in_place = device, False, in_place

    @classmethod
    def own(cls, size: int, device: int | None, *, in_place: bool = False) -> MemorySlab:
        """In large pages where the kernel has them. A memory file has small ones, and filling each costs a fault."""
        with _refused(size):
            mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
            return cls(mapping, None, device, in_place=in_place)

    @classmethod
    def shared(cls, size: int, choice: NodeChoice, device: int | None, *, in_place: bool = False) -> MemorySlab:
        """A memory file: other ranks can map it, and its pages can be bound to NUMA nodes."""
        with _refused(size):
            file = io.FileIO(os.memfd_create("gracetune-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
            file.truncate(max(size, 1))
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, SIZE_SEALS)
            bound = bind(file.fileno(), max(size, 1), choice)
            slab = cls(mmap.mmap(file.fileno(), 0), file, device, in_place=in_place)
        if choice.nodes and not bound.applied:
            slab.notes += (bound.reason,)
        return slab

    @classmethod
    def join(cls, file: io.FileIO, device: int | None, *, in_place: bool = False) -> MemorySlab:
        if fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
            found, hint = "memory that could be cut off while it is read", "run the same gracetune in all processes"
            raise HostMemoryError(Problem("host memory", found, "sealed memory of rank 0", hint))
        return cls(mmap.mmap(file.fileno(), 0), file, device, in_place=in_place)

    def settle(self) -> None:
        if self._device is None:
            return
        self._register(self._device)
        if self._in_place and self._is_locked:
            seen = view_for_gpu(self.host, self._device)
            if seen is None:
                self.notes += ("the GPU cannot read page-locked memory at its own address here: batches are copied",)
            else:
                self.view = seen

    def _register(self, device: int) -> None:
        import torch

        flags = _PORTABLE | (_MAPPED if self._in_place else 0)
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), len(self.host), flags))
            if code != 0:
                with suppress(RuntimeError):  # the runtime remembers the error and would blame the next kernel for it
                    torch.zeros(1, device=f"cuda:{device}").add_(1)
        if code == 0:
            self._is_locked = True
        else:
            self.notes += (
                f"the driver did not page-lock {format_bytes(len(self.host))} (CUDA error {code}): copies are slower; "
                "look at `ulimit -l`",
            )

    def _unregister(self) -> None:
        import torch

        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)  # copies may still be reading
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())

    def close(self) -> None:
        import torch

        if self._is_locked:
            self._is_locked = False
            self._unregister()
        # Never `mmap.close`: torch holds the mapping object but does not lock it, and the last view unmaps by itself.
        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        if self.file is not None:
            self.file.close()


class _MappedBytes:
    """Page-locked memory as CUDA's array protocol describes it; the tensor over it keeps the memory alive."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (len(host),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "stream": None,
        }


def view_for_gpu(host: Tensor, device: int) -> Tensor | None:
    """A CUDA tensor over registered main memory, without a copy; None where the GPU knows it by another address."""
    import torch

    seen = torch.as_tensor(_MappedBytes(host), device=f"cuda:{device}")
    return seen if seen.data_ptr() == host.data_ptr() else None


@contextmanager
def _refused(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "end what else uses main memory, or ask for less"
        found = f"no {format_bytes(size)} of memory: {error.strerror}"
        raise HostMemoryError(Problem("host memory", found, "as much main memory", hint)) from error
