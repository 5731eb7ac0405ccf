"""The functions that the GH200 guides document. Each returns a result that is truthy or falsy and carries its reason.

from gracetune import gh200

buffer = gh200.managed_empty((256, 16, 1, 128, 128), torch.bfloat16, home="host")
hint = gh200.prefetch_to_device(buffer.cuda())
if not hint:
    print(hint.reason)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gracetune.config.environment import Environment, memory_settings
from gracetune.data.backends.open import GH200InMemoryBackend
from gracetune.hardware import probe
from gracetune.hardware.allocation import CAREFUL_CAP
from gracetune.hostmem.hint import Hint, both, not_applied, together
from gracetune.memory.arena_size import ArenaRoom
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.experiment_tools import synchronize
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap
from gracetune.memory.native import Unavailable, Uvm, load
from gracetune.memory.tensor_hints import prefer, prefetch, tensors_with_hints
from gracetune.memory.unified_memory import UnifiedMemory, UvmStats, add_uvm_stats
from gracetune.optim.batch_ramp import Ramp as GH200GradientRamp

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchHint",
    "GH200GradientRamp",
    "GH200InMemoryBackend",
    "Hint",
    "ManagedBuffer",
    "attach",
    "gh200_uvm_enabled",
    "managed_empty",
    "memory_stats",
    "optimize_batch_for_gh200",
    "prefer_cpu_residency",
    "prefer_gpu_residency",
    "prefetch_to_device",
    "set_uvm_hint_override",
]


@dataclass
class _Process:
    """The state these functions share. It belongs to the process, like the environment and the CUDA driver."""

    override: bool | None = None
    """Set by `set_uvm_hint_override`."""
    layer: Callable[[], UnifiedMemory | None] = lambda: None
    """A weak reference to the memory layer of the running job."""


_process = _Process()


def attach(layer: UnifiedMemory) -> None:
    """Let `memory_stats` report a running job's memory layer for as long as the layer exists."""
    _process.layer = weakref.ref(layer)


def set_uvm_hint_override(value: bool | None) -> None:
    """Switch hints on or off for this process, overriding the environment variable. None removes the override."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"value is {value!r}, expected True, False or None")
    _process.override = value


def gh200_uvm_enabled() -> Hint:
    """Whether hints are switched on and available on this machine. `bytes` is always 0."""
    wanted = _wanted()
    if not wanted:
        return wanted
    uvm = _uvm()
    if isinstance(uvm, Unavailable):
        return not_applied(f"{wanted.reason}, but {uvm}")
    return Hint(True, 0, wanted.reason)


def _wanted() -> Hint:
    if _process.override is not None:
        return Hint(_process.override, 0, f"set_uvm_hint_override({_process.override})")
    found = memory_settings(Environment.capture())
    setting = found.settings.get("enable_uvm_hints")
    if setting is None:
        return not_applied("hints are off: SIMPLETUNER_GH200_ENABLE_UVM_HINTS is not set")
    return Hint(bool(setting.value), 0, f"{setting.variable}={int(setting.value)}")


@cache
def _uvm() -> Uvm | Unavailable:
    """The native library, or why it is unavailable. Loaded once per process."""
    return load()


def prefer_cpu_residency(tensor: torch.Tensor) -> Hint:
    """Set host memory as the preferred location of a managed tensor's pages, and map them for the GPU."""
    return _with_uvm(lambda uvm: prefer(uvm, tensor, "host"))


def prefer_gpu_residency(tensor: torch.Tensor) -> Hint:
    """Set GPU memory as the preferred location of a managed tensor's pages."""
    return _with_uvm(lambda uvm: prefer(uvm, tensor, "device"))


def prefetch_to_device(tensor: torch.Tensor, device: torch.device | int | str | None = None) -> Hint:
    """Start migrating a managed tensor to a GPU, by default its own, on that GPU's current stream."""

    def current_stream(index: int) -> int:
        import torch

        return torch.cuda.current_stream(index).cuda_stream

    return _with_uvm(lambda uvm: prefetch(uvm, tensor, "device", current_stream, _index(device)))


def _index(device: torch.device | int | str | None) -> int | None:
    if device is None or isinstance(device, int):
        return device
    import torch

    return torch.device(device).index or 0


@dataclass(frozen=True)
class BatchHint:
    """The result for a whole batch, and the hint of each tensor by its dotted name."""

    applied: bool
    bytes: int
    reason: str
    tensors: Mapping[str, Hint]

    def __bool__(self) -> bool:
        return self.applied


def optimize_batch_for_gh200(batch: Any) -> BatchHint:
    """Hint the tensors of a training batch by key: latents to the host, text embeddings to the GPU, audio prefetched.

    Only managed tensors can be hinted. gracetune's own trainer copies batches ahead of time and needs no hints.
    """
    enabled = gh200_uvm_enabled()
    if not enabled:
        return BatchHint(False, 0, enabled.reason, {})
    hints: dict[str, Hint] = {}
    for name, tensor, key_hint in tensors_with_hints(batch):
        hint = prefer_cpu_residency(tensor) if key_hint.home == "host" else prefer_gpu_residency(tensor)
        hints[name] = both(hint, prefetch_to_device(tensor)) if key_hint.prefetch else hint
    whole = together(hints.values()) if hints else not_applied("the batch has no tensor under a known key")
    return BatchHint(whole.applied, whole.bytes, whole.reason, hints)


def _with_uvm(give_hint: Callable[[Uvm], Hint]) -> Hint:
    enabled = gh200_uvm_enabled()
    uvm = _uvm()
    if not enabled or isinstance(uvm, Unavailable):
        return not_applied(enabled.reason)
    return give_hint(uvm)


def _heap(device: int) -> ManagedHeap:
    """The running job's heap, whose governor then counts these buffers, or else a heap of this module."""
    layer = _process.layer()
    return layer.heap if layer is not None and layer.heap.device == device else _own_heap(device)


@cache
def _own_heap(device: int) -> ManagedHeap:
    uvm = _uvm()
    if isinstance(uvm, Unavailable):
        raise UnifiedMemoryError(f"managed memory is {uvm}")
    uvm.set_managed_cap(CAREFUL_CAP if ArenaRoom.of(probe(), device).cap_reason else None)
    return ManagedHeap(uvm, device, partial(synchronize, device))


def memory_stats(device: int = 0) -> dict[str, Any]:
    """A copy of `torch.cuda.memory_stats()` with the `uvm.*` entries of docs/memory.md added.

    Without a running job the memory stage is 1 and the counters are 0, because no governor has run.
    """
    import torch

    layer = _process.layer()
    if layer is not None:
        return layer.stats()
    return add_uvm_stats(torch.cuda.memory_stats(device) if torch.cuda.is_available() else {}, UvmStats())


def managed_empty(shape: Sequence[int], dtype: torch.dtype, home: Home = "host", *, device: int = 0) -> ManagedBuffer:
    """Allocate managed memory for one tensor, with its home in host memory or on the GPU.

    This works whether or not hints are switched on, because the caller requests managed memory explicitly.
    """
    return _heap(device).empty(shape, dtype, home)
