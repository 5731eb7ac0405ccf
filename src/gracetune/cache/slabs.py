"""The memory a resident cache lies in: which kind, why, and how it is had. A slab never moves.

Main memory that several local ranks read is a memfd: a file that exists only in memory, mapped whole by each. One
process alone takes anonymous memory, which comes in large pages. For a GPU either is registered with the driver in one
piece (page-locked), so that copies from it run by themselves. Managed memory comes from the unified-memory layer, with
its home where the role says.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

from gracetune.cache.errors import CacheError
from gracetune.data.backends.numa import NodeChoice, bind
from gracetune.data.backends.share import LocalRanks
from gracetune.errors import Problem
from gracetune.hardware.machine import Machine, ProfileName
from gracetune.memory.managed import ManagedBuffer, ManagedHeap
from gracetune.memory.placement import Place, place
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

CacheType = Literal["unified_memory", "memory", "disk"]
CacheRole = Literal["latent_cache", "text_cache"]

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can cut the file off under a reader, which would kill it."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""


@dataclass(frozen=True)
class Where:
    """What the machine offers a cache."""

    machine: Machine
    device: int | None = None
    """The CUDA device that reads it; None without one."""
    heap: ManagedHeap | None = None
    """Managed memory; None where there is none."""
    no_heap: str = "this process has no unified-memory layer open"
    """Why `heap` is None."""
    ranks: LocalRanks | None = None
    """The processes of this machine that share one copy; None for one process."""

    @property
    def profile(self) -> ProfileName:
        return self.machine.profile.value if self.device is not None else "cpu"

    @property
    def device_bytes(self) -> int | None:
        if self.device is None:
            return None
        return next((gpu.memory_total for gpu in self.machine.gpus if gpu.index == self.device), None)

    @property
    def local_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.count


@dataclass(frozen=True)
class Residence:
    """Where a cache lives while the run reads it, and why; `notes` say what was asked for and is otherwise."""

    place: Place | Literal["disk"]
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def is_managed(self) -> bool:
        return self.place in ("managed_host", "managed_device")

    def instead(self, place: Place, reason: str, note: str) -> Residence:
        return replace(self, place=place, reason=reason, notes=(*self.notes, note))


def choose_residence(
    kind: CacheType,
    role: CacheRole,
    profile: ProfileName,
    *,
    size: int,
    device_bytes: int | None = None,
    local_ranks: int = 1,
    no_managed: str | None = None,
) -> Residence:
    """Pure. `no_managed`: why managed memory cannot be had, None where it can."""
    if kind == "disk":
        return Residence("disk", "as asked: read from disk when its turn comes")
    if local_ranks > 1 and profile == "cpu":
        chosen = Residence("shared_host", f"no GPU: one copy in main memory for {local_ranks} ranks")
    else:
        told = place(role, profile, size=size, device_bytes=device_bytes, local_ranks=local_ranks)
        chosen = Residence(told.place, told.reason)
    if kind == "memory" and chosen.is_managed:
        return Residence("pinned_host", "as asked: main memory, page-locked; unified_memory would take managed slabs")
    if kind == "unified_memory" and not chosen.is_managed:
        note = f"unified_memory was asked for and is not used here: {chosen.reason}"
        return replace(chosen, notes=(note,))
    if chosen.is_managed and no_managed is not None:
        note = f"unified_memory was asked for and cannot be had: {no_managed}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    return chosen


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

    def __init__(self, mapping: mmap.mmap, file: io.FileIO | None, device: int | None) -> None:
        import torch

        self.file = file
        """What other ranks can map; None for memory of this process alone."""
        self.host = self.view = torch.frombuffer(mapping, dtype=torch.uint8)
        self.notes: tuple[str, ...] = ()
        self._device, self._is_locked = device, False

    @classmethod
    def own(cls, size: int, device: int | None) -> MemorySlab:
        """In large pages where the kernel has them. A memory file has small ones, and filling each costs a fault."""
        with _refused(size):
            mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
            return cls(mapping, None, device)

    @classmethod
    def shared(cls, size: int, choice: NodeChoice, device: int | None) -> MemorySlab:
        """A memory file: other ranks can map it, and its pages can be bound to NUMA nodes."""
        with _refused(size):
            file = io.FileIO(os.memfd_create("gracetune-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
            file.truncate(max(size, 1))
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, SIZE_SEALS)
            bound = bind(file.fileno(), max(size, 1), choice)
            slab = cls(mmap.mmap(file.fileno(), 0), file, device)
        if choice.nodes and not bound.applied:
            slab.notes += (bound.reason,)
        return slab

    @classmethod
    def join(cls, file: io.FileIO, device: int | None) -> MemorySlab:
        if fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
            found, hint = "memory that could be cut off while it is read", "run the same gracetune in all processes"
            raise CacheError(Problem("cache in memory", found, "sealed memory of rank 0", hint))
        return cls(mmap.mmap(file.fileno(), 0), file, device)

    def settle(self) -> None:
        if self._device is not None:
            self._register(self._device)

    def _register(self, device: int) -> None:
        import torch

        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), len(self.host), _PORTABLE))
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

    def close(self) -> None:
        import torch

        if self._is_locked:
            self._is_locked = False
            with torch.cuda.device(self._device):
                torch.cuda.synchronize(self._device)  # copies may still be reading
                torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())
        # Never `mmap.close`: torch holds the mapping object but does not lock it, and the last view unmaps by itself.
        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        if self.file is not None:
            self.file.close()


@contextmanager
def _refused(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "set cache.vae_cache_type and text_cache_type to disk"
        found = f"no {format_bytes(size)} of memory: {error.strerror}"
        raise CacheError(Problem("cache in memory", found, "as much main memory", hint)) from error


class ManagedSlab:
    """Managed memory: the GPU reads it where it lies."""

    def __init__(self, heap: ManagedHeap, size: int, home: Literal["host", "device"]) -> None:
        import torch

        self._buffer: ManagedBuffer = heap.empty((max(size, 1),), torch.uint8, home)
        self._home = home
        self.host = self._buffer.cpu()
        self.view = self._buffer.cuda()
        self.notes: tuple[str, ...] = ()

    def settle(self) -> None:
        """The CPU wrote the pages, so that is where they lie: those that belong on the device go there once."""
        import torch

        if self._home == "device":
            stream = torch.cuda.current_stream(self._buffer.device)
            self._buffer.prefetch("device", stream.cuda_stream)
            stream.synchronize()

    def close(self) -> None:
        import torch

        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        self._buffer.close()
