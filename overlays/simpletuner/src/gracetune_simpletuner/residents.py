"""Upstream's cache entries in gracetune's slabs: read from disk once, then served as views.

Every lookup returns new containers, so upstream may add to the dict it gets. The tensors are shared by all epochs,
since upstream copies before it modifies anything. If that ever changes, the next lookup raises an error instead of
training on altered latents: torch counts in-place writes to a tensor and its views (`_version`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from gracetune.extension import (
    CacheResources,
    CacheRole,
    CacheType,
    HostSensor,
    ManagedSlab,
    MemorySlab,
    Residence,
    Slab,
    UnifiedMemoryError,
    choose_residence,
    format_bytes,
    host_reserve,
)
from gracetune_simpletuner.errors import EntryChangedError
from gracetune_simpletuner.telemetry import Counts

LARGEST_SLAB: Final = 256 << 20
SMALLEST_SLAB: Final = 1 << 20
_ALIGNED: Final = 64
_THREADS: Final = 8
_PLAIN: Final = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class UnfitError(Exception):
    """An entry that cannot be stored in a slab and stays on disk; the message says why."""


def needed_bytes(value: Any) -> int:
    """Bytes that an entry needs in a slab. Raises UnfitError if it cannot be stored."""
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            raise UnfitError(f"holds a {type(value).__name__} that is no plain tensor in main memory")
        if value.requires_grad or value.is_quantized:
            raise UnfitError("holds a tensor with a gradient or quantized values")
        return _rounded(value.numel() * value.element_size())
    if type(value) is dict:
        return sum(needed_bytes(item) for item in value.values())
    if type(value) in (list, tuple):
        return sum(needed_bytes(item) for item in value)
    if type(value) in _PLAIN:
        return 0
    raise UnfitError(f"holds a {type(value).__name__}")


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy in new containers with `change` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if type(value) is list:
        return [mapped(item, change) for item in value]
    if type(value) is tuple:
        return tuple(mapped(item, change) for item in value)
    return value


@dataclass
class _Filling:
    """A slab and its fill level."""

    slab: Slab
    size: int
    used: int = 0
    version: int = 0

    def check(self) -> None:
        """Raise EntryChangedError if an entry was modified."""
        if self.slab.host._version != self.version:
            raise EntryChangedError(
                "a cached entry was changed in place\n"
                "  found     a write into memory that all epochs read\n"
                "  expected  upstream to copy before it changes a latent or an embedding\n"
                '  try       "vae_cache_type": "disk" and "text_cache_type": "disk", and tell us'
            )

    def keep(self, value: Any) -> Any:
        self.check()
        kept = mapped(value, self._put)
        self.version = self.slab.host._version
        return kept

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel() * tensor.element_size()
        room = self.slab.host[self.used : self.used + count]
        self.used += _rounded(count)
        view = room.view(tensor.dtype)
        dense = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if tensor.numel() and dense == tensor.numel():
            view = view.as_strided(tensor.shape, tensor.stride())
        else:
            view = view.view(tensor.shape)
        return view.copy_(tensor)


@dataclass
class _Role:
    """One kind of cache: its memory and its slabs."""

    kind: CacheType
    residence: Residence | None = None
    slabs: list[_Filling] = field(default_factory=list)


class Residents:
    """Upstream's cache entries in memory. Thread-safe."""

    def __init__(
        self, kinds: dict[CacheRole, CacheType], resources: CacheResources, counts: Counts, *, sharers: int = 1
    ) -> None:
        self._resources, self._counts, self._sharers = resources, counts, sharers
        self._roles = {role: _Role(kind) for role, kind in kinds.items()}
        self._folders: dict[str, CacheRole] = {}
        self._entries: dict[str, tuple[Any, int, _Filling]] = {}
        self._lock = threading.Lock()
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and _key(path) in self._entries

    @property
    def held_bytes(self) -> int:
        return sum(slab.used for role in self._roles.values() for slab in role.slabs)

    def wants(self, role: CacheRole) -> bool:
        return self._roles[role].kind != "disk"

    def fill(self, role: CacheRole, folder: str, files: Iterable[str], load: Callable[[str], Any]) -> None:
        """Load these entries. Other entries of the folder are stored when they are first read."""
        paths = [path for path in dict.fromkeys(map(_key, files)) if path not in self._entries]
        on_disk = sum(_size_of(path) for path in paths)
        self._folders[_key(folder)] = role
        self._settle_on(role, on_disk)
        with ThreadPoolExecutor(_THREADS) as threads:
            for path, value in zip(paths, threads.map(lambda path: self._loaded(path, load), paths), strict=True):
                if value is not None:
                    self._put(role, path, value, on_disk)

    def _loaded(self, path: str, load: Callable[[str], Any]) -> Any:
        if _size_of(path) == 0:
            self._counts.reject("entries_left_on_disk", "not written yet")
            return None
        return load(path)

    def offer(self, path: str, value: Any) -> None:
        """Store an entry that was just read from disk."""
        key = _key(path)
        role = next((role for folder, role in self._folders.items() if key.startswith(f"{folder}/")), None)
        if role is not None and key not in self._entries:
            self._put(role, key, value, SMALLEST_SLAB)

    def look_up(self, path: str) -> Any:
        """The entry in new containers; None if it is not in memory."""
        found = self._entries.get(_key(path))
        if found is None:
            return None
        value, size, filling = found
        with self._lock:  # filling a slab writes to it too, in other threads
            filling.check()
        self._counts.add("hits")
        self._counts.add("hit_bytes", size)
        # Validation may call this in inference mode. Views created there could not be used for training.
        with torch.inference_mode(False):
            return mapped(value, torch.Tensor.detach)

    def forget(self, path: Any) -> None:
        """Drop an entry. Its space in the slab is not reused, because caches are rarely rewritten during a run."""
        if isinstance(path, str | os.PathLike) and self._entries.pop(_key(path), None) is not None:
            self._counts.add("forgotten")

    def report(self) -> list[dict[str, Any]]:
        """One object per kind of cache: its memory, and why."""
        return [
            {
                "cache": name,
                "place": role.residence.kind,
                "reason": role.residence.reason,
                "notes": list(role.residence.notes),
                "used_bytes": sum(filling.used for filling in role.slabs),
                "slab_bytes": sum(filling.size for filling in role.slabs),
            }
            for name, role in self._roles.items()
            if role.residence is not None
        ]

    def close(self) -> None:
        self._entries.clear()
        self._folders.clear()
        for role in self._roles.values():
            while role.slabs:
                role.slabs.pop().slab.close()

    def _settle_on(self, role: CacheRole, size: int) -> None:
        chosen = self._roles[role]
        if chosen.residence is None:
            resources = self._resources
            chosen.residence = choose_residence(
                chosen.kind,
                role,
                resources.profile,
                size=size,
                device_bytes=resources.device_bytes,
                no_managed=resources.no_heap if resources.heap is None else None,
            )

    def _put(self, role: CacheRole, path: str, value: Any, expected: int) -> None:
        try:
            needed = needed_bytes(value)
        except UnfitError as error:
            self._counts.reject("entries_left_on_disk", str(error))
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            filling = self._room(role, needed, expected)
            if filling is None:
                self._counts.reject("entries_left_on_disk", "main memory has no room to spare")
                return
            self._entries[path] = (filling.keep(value), needed, filling)
        self._counts.add("entries")
        self._counts.add("entry_bytes", needed)

    def _room(self, role: CacheRole, needed: int, expected: int) -> _Filling | None:
        slabs = self._roles[role].slabs
        if slabs and slabs[-1].size - slabs[-1].used >= needed:
            return slabs[-1]
        size = max(needed, min(max(expected, SMALLEST_SLAB), LARGEST_SLAB))
        spare = self._spare()
        if spare is not None and size > spare:
            size = needed
        if spare is not None and size > spare:
            return None
        slab = self._slab(role, size)
        slabs.append(_Filling(slab, size, version=slab.host._version))
        return slabs[-1]

    def _spare(self) -> int | None:
        """Bytes that this process may still use; None if unknown."""
        headroom = HostSensor(nodes=self._resources.machine.host.numa_nodes).read().headroom
        return None if headroom is None else max(0, headroom - host_reserve(self._resources.machine)) // self._sharers

    def _slab(self, role: CacheRole, size: int) -> Slab:
        chosen = self._roles[role]
        assert chosen.residence is not None
        if chosen.residence.is_managed and self._resources.heap is not None:
            try:
                # Upstream collates batches on the CPU, so the pages are placed in host memory.
                return ManagedSlab(self._resources.heap, size, "host")
            except UnifiedMemoryError as error:
                message = f"unified_memory was requested but is not available: {str(error).splitlines()[0]}"
                chosen.residence = chosen.residence.instead("pinned_host", "page-locked main memory", message)
        slab = MemorySlab.own(size, self._resources.device)
        self.notes += [f"{format_bytes(size)}: {note}" for note in slab.notes]
        return slab


def _key(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))  # noqa: PTH100 - does not resolve links


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0
