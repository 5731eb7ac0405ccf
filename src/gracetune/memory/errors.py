"""Errors of unified memory. Each message ends with a remedy if one is known."""

from __future__ import annotations

from collections.abc import Sequence

from gracetune.errors import GracetuneError, Problem
from gracetune.units import format_bytes

_RESTART = "the GPU's context is lost after this error: restart the process"
# By CUresult value of cuda.h. These errors occur after initialization; the doctor explains failures of `cuInit`.
_REMEDIES = {
    2: "out of memory: lower the managed cap or uvm_oversubscription_ratio, or free host memory",
    46: "another process uses the GPU exclusively: see nvidia-smi",
    101: "no such GPU in this process: compare the device number with CUDA_VISIBLE_DEVICES",
    700: _RESTART,
    714: _RESTART,
    719: _RESTART,
    801: "the GPU or driver lacks this form of managed memory: see `gracetune doctor`",
}


class UnifiedMemoryError(GracetuneError):
    """An operation on managed memory failed."""


class DriverError(UnifiedMemoryError):
    """A call of the CUDA driver failed."""

    def __init__(self, function: str, code: int, name: str, text: str = "") -> None:
        self.function = function
        self.code = code
        self.name = name or "unnamed error"
        self.remedy = _REMEDIES.get(code)
        words = f": {text}" if text else ""
        remedy = f"\n  try  {self.remedy}" if self.remedy else ""
        super().__init__(f"{function} failed with {self.name} ({code}){words}{remedy}")


class ManagedCapError(UnifiedMemoryError):
    """The allocation would exceed the process-wide cap on managed bytes. Nothing was allocated."""

    def __init__(self, *, requested: int, live: int, cap: int) -> None:
        self.requested, self.live, self.cap = requested, live, cap
        super().__init__(
            f"{format_bytes(requested)} of managed memory rejected: {format_bytes(live)} of the cap of "
            f"{format_bytes(cap)} "
            "are in use\n  try  free managed buffers, or raise the cap; on a machine without coherent memory that "
            "requires --force-oversubscription"
        )


class UsedAfterForkError(UnifiedMemoryError):
    """Managed memory was used in a forked process. CUDA does not survive a fork."""

    def __init__(self) -> None:
        super().__init__(
            "managed memory was used in a forked process, where CUDA does not work\n"
            "  try  start workers as threads, or with the multiprocessing start method 'spawn'"
        )


class DriverTooOldError(UnifiedMemoryError):
    """The driver lacks a function of a later CUDA version."""

    def __init__(self, function: str) -> None:
        self.function = function
        super().__init__(
            f"this CUDA driver has no {function}\n"
            "  try  install a newer driver; `gracetune doctor` shows the installed version"
        )


class MemoryPressure(GracetuneError):  # noqa: N818 - a state of the machine, and the name used in the docs
    """Main memory, which holds the GPU's overflow, is nearly exhausted. Raised early enough to save a checkpoint."""

    def __init__(self, *, headroom: int, reserve: int, arena_active: int | None) -> None:
        self.headroom, self.reserve, self.arena_active = headroom, reserve, arena_active
        overflow = "an unknown amount" if arena_active is None else format_bytes(arena_active)
        problem = Problem(
            key="main memory is nearly exhausted while it holds the GPU's overflow",
            found=f"{format_bytes(headroom)} left after all caches were released; the overflow holds {overflow}",
            expected=f"at least the reserve of {format_bytes(reserve)}",
            hint="--set training.gradient_checkpointing=full, a smaller training.batch_size or resolution, "
            "or caches on disk: --set cache.vae_cache_type=disk --set cache.text_cache_type=disk",
        )
        super().__init__(str(problem))


class CacheWrittenError(UnifiedMemoryError):
    """A step wrote into a batch that is a view of the cache. Later epochs would train on the modified data."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"a step wrote into {', '.join(names)} of its batch, which is a view of the cache\n"
            "  expected  batch tensors are only read\n"
            "  try  clone the tensor in the model family's `predict` before modifying it"
        )
