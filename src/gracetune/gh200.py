"""The names the GH200 guides promise, doing what they say. Every answer is truthy or falsy and carries its reason.

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
from gracetune.memory.arena_size import Room
from gracetune.memory.batch_hints import tensors_with_wishes
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.layer import UnifiedMemory
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap
from gracetune.memory.native import Unavailable, Uvm, load
from gracetune.memory.stats import UvmStats, merged
from gracetune.memory.tensor_hints import prefer, prefetch
from gracetune.memory.trial import synchronize
from gracetune.optim.ramp import Ramp as GH200GradientRamp

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
    """What these names share. It is the process's, as the environment variable and the CUDA driver are."""

    override: bool | None = None
    layer: Callable[[], UnifiedMemory | None] = lambda: None


_process = _Process()


def attach(layer: UnifiedMemory) -> None:
    """Let `memory_stats` speak for a running job's memory layer, for as long as that lives."""
    _process.layer = weakref.ref(layer)


def set_uvm_hint_override(value: bool | None) -> None:
    """Switch hints on or off for this process, whatever the environment says; None hands it back to the environment."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"True, False or None, not {value!r}")
    _process.override = value


def gh200_uvm_enabled() -> Hint:
    """Whether hints are wanted here and can be given. `bytes` is always 0."""
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
    """The native shim is one per process; so is the answer whether it can be had."""
    return load()


def prefer_cpu_residency(tensor: torch.Tensor) -> Hint:
    """Let a managed tensor's pages prefer host memory, mapped for the GPU."""
    return _with_uvm(lambda uvm: prefer(uvm, tensor, "host"))


def prefer_gpu_residency(tensor: torch.Tensor) -> Hint:
    """Let a managed tensor's pages prefer the GPU's memory."""
    return _with_uvm(lambda uvm: prefer(uvm, tensor, "device"))


def prefetch_to_device(tensor: torch.Tensor, device: torch.device | int | str | None = None) -> Hint:
    """Start moving a managed tensor to a GPU (its own, unless told) on that GPU's current stream."""

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
    """What became of a whole batch: one answer in all, and one for each tensor by its dotted name."""

    applied: bool
    bytes: int
    reason: str
    tensors: Mapping[str, Hint]

    def __bool__(self) -> bool:
        return self.applied


def optimize_batch_for_gh200(batch: Any) -> BatchHint:
    """Hint the tensors of a training batch by their keys: latents to the host, text to the GPU, audio prefetched.

    Only managed tensors can be hinted. Batches of our own trainer are copied ahead of time and need no hints.
    """
    enabled = gh200_uvm_enabled()
    if not enabled:
        return BatchHint(False, 0, enabled.reason, {})
    hints: dict[str, Hint] = {}
    for name, tensor, wish in tensors_with_wishes(batch):
        hint = prefer_cpu_residency(tensor) if wish.home == "host" else prefer_gpu_residency(tensor)
        hints[name] = both(hint, prefetch_to_device(tensor)) if wish.prefetch else hint
    whole = together(hints.values()) if hints else not_applied("no tensor under a key we know")
    return BatchHint(whole.applied, whole.bytes, whole.reason, hints)


def _with_uvm(act: Callable[[Uvm], Hint]) -> Hint:
    enabled = gh200_uvm_enabled()
    uvm = _uvm()
    if not enabled or isinstance(uvm, Unavailable):
        return not_applied(enabled.reason)
    return act(uvm)


def _heap(device: int) -> ManagedHeap:
    """The running job's heap, so that its governor knows these buffers; else one of our own."""
    layer = _process.layer()
    return layer.heap if layer is not None and layer.heap.device == device else _own_heap(device)


@cache
def _own_heap(device: int) -> ManagedHeap:
    uvm = _uvm()
    if isinstance(uvm, Unavailable):
        raise UnifiedMemoryError(f"managed memory is {uvm}")
    uvm.set_managed_cap(CAREFUL_CAP if Room.of(probe(), device).careful else None)
    return ManagedHeap(uvm, device, partial(synchronize, device))


def memory_stats(device: int = 0) -> dict[str, Any]:
    """A copy of `torch.cuda.memory_stats()` with `uvm.stage`, `uvm.transitions` and the rest of docs/memory.md added.

    Without a running job the stage is 1 and the counters are 0, because nothing has been governed.
    """
    import torch

    layer = _process.layer()
    if layer is not None:
        return layer.stats()
    return merged(torch.cuda.memory_stats(device) if torch.cuda.is_available() else {}, UvmStats())


def managed_empty(shape: Sequence[int], dtype: torch.dtype, home: Home = "host", *, device: int = 0) -> ManagedBuffer:
    """Managed memory for one tensor, at home in host memory or on the GPU. Asked for by name, so no switch applies."""
    return _heap(device).empty(shape, dtype, home)
