"""Slabs of main memory: one large block that is mapped as a whole and never moves.

Memory shared by several local ranks is a memfd, a file that exists only in memory, mapped by each of them. A single
process uses anonymous memory, which the kernel can back with huge pages. If there is a GPU, either kind is page-locked
(registered with the CUDA driver) in one piece, so that copies from it are asynchronous. `memory.managed`
implements the same protocol with managed memory.
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
"""No process can truncate the file. A reader of a truncated mapping would be killed by SIGBUS."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""
_MAPPED: Final = 2
"""cudaHostRegisterMapped: the GPU can read the memory in place."""


class Slab(Protocol):
    host: Tensor
    """The bytes as a CPU tensor. Data is loaded into this one."""
    view: Tensor
    """The bytes as a tensor from which batches are gathered: `host` itself, or a CUDA view of the same memory."""
    notes: tuple[str, ...]
    """Notes for the user: memory that was not page-locked, or not bound to its NUMA nodes."""

    def settle(self) -> None:
        """Prepare the memory for copies to the GPU (page-lock it, or move it there). Every rank that uses
        the slab calls this, after one of them has loaded all data."""

    def close(self) -> None:
        """Release the slab. Tensors that still view its memory stay valid."""


class MemorySlab:
    """A slab of main memory. `own` and `shared` create one; `join` maps one that another rank created.

    It is page-locked after loading. Page-locking an empty slab would make the driver fault in every page with a single
    thread, while loading does it with all of its threads.
    """

    def __init__(self, mapping: mmap.mmap, file: io.FileIO | None, device: int | None, *, in_place: bool) -> None:
        """With `in_place`, the GPU reads the memory directly: `view` becomes a CUDA tensor over the same bytes."""
        import torch

        self.file = file
        """The memory file that other ranks can map; None for memory of this process only."""
        self.host = self.view = torch.frombuffer(mapping, dtype=torch.uint8)
        self.notes: tuple[str, ...] = ()
        self._device, self._is_locked, self._in_place = device, False, in_place

    @classmethod
    def own(cls, size: int, device: int | None, *, in_place: bool = False) -> MemorySlab:
        """Anonymous memory of this process, in huge pages if the kernel has them: they take far fewer page faults to
        fill than the small pages of a memory file."""
        with _explained(size):
            mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without transparent huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
            return cls(mapping, None, device, in_place=in_place)

    @classmethod
    def shared(cls, size: int, choice: NodeChoice, device: int | None, *, in_place: bool = False) -> MemorySlab:
        """A memory file, which other ranks can map and whose pages can be bound to NUMA nodes."""
        with _explained(size):
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
        """Map the memory file of another rank."""
        if fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
            found = "memory that could be truncated while it is read"
            hint = "run the same version of gracetune in all processes"
            raise HostMemoryError(Problem("host memory", found, "sealed memory of rank 0", hint))
        return cls(mmap.mmap(file.fileno(), 0), file, device, in_place=in_place)

    def settle(self) -> None:
        if self._device is None:
            return
        self._register(self._device)
        if self._in_place and self._is_locked:
            view = view_for_gpu(self.host, self._device)
            if view is None:
                self.notes += ("the GPU cannot read page-locked memory in place here: batches are copied",)
            else:
                self.view = view

    def _register(self, device: int) -> None:
        import torch

        flags = _PORTABLE | (_MAPPED if self._in_place else 0)
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), len(self.host), flags))
            if code != 0:
                # The CUDA runtime keeps the error and reports it at the next kernel launch. Launch one to clear it.
                with suppress(RuntimeError):
                    torch.zeros(1, device=f"cuda:{device}").add_(1)
        if code == 0:
            self._is_locked = True
        else:
            self.notes += (
                f"the driver did not page-lock {format_bytes(len(self.host))} (CUDA error {code}): copies are slower; "
                "check the limit with `ulimit -l`",
            )

    def _unregister(self) -> None:
        import torch

        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)  # asynchronous copies may still read the memory
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())

    def close(self) -> None:
        import torch

        if self._is_locked:
            self._is_locked = False
            self._unregister()
        # Never call `mmap.close`: torch keeps a reference to the mapping but exports no buffer that would stop it from
        # being unmapped under live tensors. It is unmapped when the last tensor goes away.
        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        if self.file is not None:
            self.file.close()


class _MappedBytes:
    """Page-locked memory in the CUDA array interface. The tensor created from it keeps the memory alive."""

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
    """A CUDA tensor over page-locked main memory, without a copy. None if the GPU maps it at a different address."""
    import torch

    view = torch.as_tensor(_MappedBytes(host), device=f"cuda:{device}")
    return view if view.data_ptr() == host.data_ptr() else None


@contextmanager
def _explained(size: int) -> Iterator[None]:
    """Turn an OSError from allocating `size` bytes into a HostMemoryError."""
    try:
        yield
    except OSError as error:
        hint = "end other processes that use main memory, or lower the configured sizes"
        found = f"cannot allocate {format_bytes(size)}: {error.strerror}"
        raise HostMemoryError(Problem("host memory", found, "that much free main memory", hint)) from error
