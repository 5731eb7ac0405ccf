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
from gracetune.config.run_config import RunConfig
from gracetune.errors import Problem
from gracetune.hardware.machine import Machine, ProfileName
from gracetune.hostmem.hint import Hint
from gracetune.hostmem.numa import NodeChoice, bind
from gracetune.hostmem.sharing import LocalRanks
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap
from gracetune.memory.placement import FOLLOW_CACHES, Hints, Place, hints_of, place
from gracetune.memory.transport import TransportChoice, choose_transport
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

CacheType = Literal["unified_memory", "memory", "disk"]
CacheRole = Literal["latent_cache", "text_cache"]

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can cut the file off under a reader, which would kill it."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""
_MAPPED: Final = 2
"""cudaHostRegisterMapped: the GPU can read it where it lies."""


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
    hints: Hints = FOLLOW_CACHES
    """Whether caches may be managed memory at all."""
    transport: TransportChoice | None = None
    """How batches reach the GPU, by measurement; None where nobody has chosen."""

    @property
    def profile(self) -> ProfileName:
        return self.machine.profile.value if self.device is not None else "cpu"

    @property
    def device_bytes(self) -> int | None:
        if self.device is None:
            return None
        return next((gpu.memory_total for gpu in self.machine.gpus if gpu.index == self.device), None)

    @property
    def reads_in_place(self) -> bool:
        """A GPU without memory of its own: it reads a cache where it lies."""
        return self.profile == "integrated"

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
    hints: Hints = FOLLOW_CACHES,
    transport: TransportChoice | None = None,
) -> Residence:
    """Pure. `no_managed`: why managed memory cannot be had, None where it can."""
    if kind == "disk":
        return Residence("disk", "as asked: read from disk when its turn comes")
    if local_ranks > 1 and profile == "cpu":
        chosen = Residence("shared_host", f"no GPU: one copy in main memory for {local_ranks} ranks")
    else:
        # Who asks for managed memory by name gets on a discrete GPU what the table says of a superchip.
        insists = kind == "unified_memory" and hints.asked and profile == "discrete"
        table: ProfileName = "superchip" if insists else profile
        told = place(role, table, size=size, device_bytes=device_bytes, local_ranks=local_ranks)
        chosen = Residence(told.place, told.reason)
    if kind == "memory" and chosen.is_managed:
        return Residence("pinned_host", "as asked: main memory, page-locked; unified_memory would take managed slabs")
    if kind == "unified_memory":
        return _unified(chosen, profile, hints, transport, no_managed)
    return chosen


def _unified(
    chosen: Residence, profile: ProfileName, hints: Hints, transport: TransportChoice | None, no_managed: str | None
) -> Residence:
    """What becomes of a cache that was asked for in managed memory."""
    if not hints.on:
        note = f"unified_memory was asked for and is not used: {hints.reason}"
        if chosen.is_managed:
            return chosen.instead("pinned_host", "page-locked main memory", note)
        return replace(chosen, notes=(note,))
    if not chosen.is_managed:
        note = f"unified_memory was asked for and is not used here: {chosen.reason}"
        if profile == "discrete" and chosen.place == "pinned_host":
            note += f"; {_INSIST}"
        return replace(chosen, notes=(note,))
    if no_managed is not None:
        note = f"unified_memory was asked for and cannot be had: {no_managed}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    if hints.asked:
        return replace(chosen, reason=f"{chosen.reason}; {hints.reason}")
    if chosen.place == "managed_host" and transport is not None and transport.prefers_pinned:
        note = f"unified_memory was asked for and is slower here: {transport.reason}; {_INSIST}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    return chosen


def placement_lines(
    config: RunConfig, machine: Machine, *, latent_bytes: int, text_bytes: int, local_ranks: int = 1
) -> list[str]:
    """What residency hints will do on a machine, in words and before anything is loaded; none where nobody asked.

    `latent_bytes` and `text_bytes` are what the caches will take in memory. Speeds are measured when the run starts.
    """
    hints, cache = hints_of(config), config.cache
    if config.memory.enable_uvm_hints is None and not hints.on:
        return []
    profile = machine.profile.value
    device_bytes = machine.gpus[0].memory_total if machine.gpus else None

    def found(role: CacheRole, kind: CacheType, size: int) -> Residence:
        return choose_residence(
            kind, role, profile, size=size, device_bytes=device_bytes, local_ranks=local_ranks, hints=hints
        )

    latents = found("latent_cache", cache.vae_cache_type, latent_bytes)
    texts = found("text_cache", cache.text_cache_type, text_bytes)
    places = f"latents: {latents.place}; text: {texts.place}"
    if "managed_host" in (latents.place, texts.place):
        places += "; masks, small tensors: GPU"
    notes = dict.fromkeys((*latents.notes, *texts.notes))
    way = choose_transport(profile, None)
    batches = way.reason if way.transport == "in_place" else "the way is measured when the run starts, then chosen"
    state = "on" if latents.is_managed or texts.is_managed else "on, with no managed cache" if hints.on else "off"
    return [f"residency hints {state}: {hints.reason}", places, *notes, f"batches: {batches}"]


_INSIST: Final = "memory.enable_uvm_hints: true uses managed memory anyway"


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
            raise CacheError(Problem("cache in memory", found, "sealed memory of rank 0", hint))
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
        hint = "set cache.vae_cache_type and text_cache_type to disk"
        found = f"no {format_bytes(size)} of memory: {error.strerror}"
        raise CacheError(Problem("cache in memory", found, "as much main memory", hint)) from error


class ManagedSlab:
    """Managed memory: the GPU reads it where it lies."""

    def __init__(self, heap: ManagedHeap, size: int, home: Home) -> None:
        import torch

        self._buffer: ManagedBuffer = heap.empty((max(size, 1),), torch.uint8, home)
        self.home = home
        self.host = self._buffer.cpu()
        self.view = self._buffer.cuda()
        self.notes: tuple[str, ...] = ()

    def settle(self) -> None:
        """The CPU wrote the pages, so that is where they lie: those that belong on the device go there once."""
        import torch

        if self.home == "device":
            stream = torch.cuda.current_stream(self._buffer.device)
            self._buffer.prefetch("device", stream.cuda_stream)
            stream.synchronize()

    def move(self, home: Home, stream: int) -> Hint:
        """Prefer another home from now on, and start moving there on a CUDA stream. Batches are right meanwhile."""
        hint = self._buffer.rehome(home)
        if hint:
            self._buffer.prefetch(home, stream)
            self.home = home
        return hint

    def close(self) -> None:
        import torch

        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        self._buffer.close()
