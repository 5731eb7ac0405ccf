"""ai-toolkit's cache files in memory: read once, then served as copies.

ai-toolkit owns what `load_file` returns and may write to it. Copies keep such writes out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gracetune import gh200
from gracetune.extension import (
    CacheRole,
    HostSensor,
    Machine,
    ManagedHeap,
    ManagedSlab,
    MemorySlab,
    Residence,
    Slab,
    UnifiedMemoryError,
    WeightFileError,
    choose_residence,
    format_bytes,
    host_reserve,
    open_weights,
)

ALIGNMENT: Final = 512
Report = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class _TensorBytes:
    """The bytes of one tensor in a slab."""

    slab: Slab
    start: int
    like: Tensor
    """A meta tensor with its dtype and shape."""

    def copy(self) -> Tensor:
        raw = self.slab.view[self.start : self.start + self.like.numel() * self.like.element_size()]
        return raw.view(self.like.dtype).reshape(self.like.shape).clone()


@dataclass
class Budget:
    """Memory that caches may still use: the job's `limit`, if any, and the spare main memory."""

    machine: Machine
    limit: int | None
    taken: int = 0

    def left(self) -> tuple[int | None, str]:
        headroom = HostSensor(nodes=self.machine.host.numa_nodes).read().headroom
        spare = None if headroom is None else max(0, headroom - host_reserve(self.machine))
        own = None if self.limit is None else max(0, self.limit - self.taken)
        if own is not None and (spare is None or own <= spare):
            return own, f"limit_gib leaves {format_bytes(own)}"
        return spare, "" if spare is None else f"main memory has {format_bytes(spare)} to spare"


@dataclass
class Counts:
    files: int = 0
    bytes: int = 0
    left_on_disk: int = 0
    unreadable: int = 0
    """Missing or damaged files, which ai-toolkit reports itself."""
    hits: int = 0
    disk_reads: int = 0
    """Reads of files that were left on disk."""


@dataclass(eq=False)
class ResidentFiles:
    role: CacheRole
    unified: bool
    budget: Budget
    report: Report
    device: int | None = None
    """Index of the training GPU; None without one."""
    heap: ManagedHeap | str = "gracetune.memory is not in the job's `gracetune:` block"
    """The managed heap, or why there is none."""
    counts: Counts = field(default_factory=Counts)
    notes: list[str] = field(default_factory=list)
    _files: dict[str, dict[str, _TensorBytes]] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    _slabs: list[Slab] = field(default_factory=list)

    def add(self, files: Iterable[str]) -> None:
        """Load new files into memory in their order, as many as fit."""
        new = [file for file in dict.fromkeys(map(_name, files)) if file not in self._known]
        self._known.update(new)
        chosen = self._chosen(new)
        if not chosen:
            return
        slab = self._slab(sum(chosen.values()))
        start = 0
        for file, size in chosen.items():
            self._load(file, slab, start)
            start += size
        slab.settle()
        if isinstance(slab, ManagedSlab):
            self._hint(slab)
        self.report(
            f"{self.role}: {self.counts.files} files, {format_bytes(self.counts.bytes)} in memory"
            + (f"; {self.counts.left_on_disk} left on disk" if self.counts.left_on_disk else "")
        )

    def _chosen(self, files: list[str]) -> dict[str, int]:
        """The files that fit, and the bytes they need."""
        room, why = self.budget.left()
        chosen: dict[str, int] = {}
        left = 0
        for file in files:
            try:
                size = sum(_padded(entry.size) for entry in open_weights(Path(file)).entries.values())
            except WeightFileError:
                self.counts.unreadable += 1
                continue
            if room is not None and size > room:
                left += 1
                continue
            room = None if room is None else room - size
            chosen[file] = size
        self.counts.left_on_disk += left
        if left:
            self._note(f"{left} of {len(files)} files of the {self.role} stay on disk: {why}")
        self.budget.taken += sum(chosen.values())
        return chosen

    def _slab(self, size: int) -> Slab:
        slab = self._managed(size) if self.unified else None
        # Not page-locked: loader processes read it too, and reads return copies anyway.
        slab = slab or MemorySlab.own(size, None)
        self._slabs.append(slab)
        return slab

    def _managed(self, size: int) -> Slab | None:
        machine, heap = self.budget.machine, self.heap
        residence: Residence = choose_residence(
            "unified_memory",
            self.role,
            machine.profile.value if self.device is not None else "cpu",
            size=size,
            device_bytes=next((gpu.memory_total for gpu in machine.gpus if gpu.index == self.device), None),
            no_managed=heap if isinstance(heap, str) else None,
        )
        for note in residence.notes:
            self._note(f"{self.role}: {note}")
        if not residence.is_managed or isinstance(heap, str):
            return None
        try:
            return ManagedSlab(heap, size, "host" if residence.kind == "managed_host" else "device")
        except UnifiedMemoryError as error:
            self._note(f"{self.role}: unified memory is not available, plain main memory is used instead: {error}")
            return None

    def _hint(self, slab: ManagedSlab) -> None:
        """Give the residency hint of `enable_uvm_hints` and note the driver's answer.

        The preferred location is set already.
        """
        give_hint = gh200.prefer_cpu_residency if self.role == "latent_cache" else gh200.prefer_gpu_residency
        hint = give_hint(slab.view)
        self._note(f"{self.role}: residency hint {'given' if hint else 'not given'}: {hint.reason}")

    def _load(self, file: str, slab: Slab, start: int) -> None:
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError):
            self.counts.unreadable += 1
            return
        parts = {}
        for name, tensor in tensors.items():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            slab.host[start : start + raw.numel()].copy_(raw)
            parts[name] = _TensorBytes(slab, start, tensor.to("meta"))
            start += _padded(raw.numel())
            self.counts.bytes += raw.numel()
        self._files[file] = parts
        self.counts.files += 1

    def find(self, file: str, read: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors of a file: copies from memory, or the result of `read` for files that are not in memory."""
        name = _name(file)
        parts = self._files.get(name)
        if parts is not None:
            self.counts.hits += 1
            return {key: part.copy().to(self._home) for key, part in parts.items()}
        tensors = read()
        if name not in self._known:
            return tensors  # not a file of this cache
        self.counts.disk_reads += 1
        return {key: tensor.to(self._home) for key, tensor in tensors.items()}

    @property
    def _home(self) -> torch.device:
        """The device of all results: a batch may mix files from several slabs and from disk."""
        return self._slabs[0].view.device if self._slabs else torch.device("cpu")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.report(text)

    def close(self) -> None:
        self._files.clear()
        while self._slabs:
            self._slabs.pop().close()


def _name(file: str) -> str:
    return str(Path(file).absolute())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
