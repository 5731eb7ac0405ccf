"""What goes wrong with unified memory. Each message ends with what to do, where we know it."""

from __future__ import annotations

from collections.abc import Sequence

from gracetune.errors import GracetuneError, Problem
from gracetune.units import format_bytes

_RESTART = "the GPU's context is lost after this error: restart the process"
# CUresult values of cuda.h. What stops `cuInit` is explained by the doctor; these are met later.
_REMEDIES = {
    2: "no memory for it: lower the managed cap or uvm_oversubscription_ratio, or free host memory",
    46: "another process holds the GPU exclusively: look at nvidia-smi",
    101: "no such GPU in this process: compare the device number with CUDA_VISIBLE_DEVICES",
    700: _RESTART,
    714: _RESTART,
    719: _RESTART,
    801: "the GPU or driver lacks this form of managed memory: see `gracetune doctor`",
}


class UnifiedMemoryError(GracetuneError):
    """Managed memory could not do what was asked."""


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
    """The process-wide cap on managed bytes would have been exceeded; nothing was allocated."""

    def __init__(self, *, asked: int, live: int, cap: int) -> None:
        self.asked, self.live, self.cap = asked, live, cap
        super().__init__(
            f"{format_bytes(asked)} of managed memory refused: {format_bytes(live)} of the cap of {format_bytes(cap)} "
            "are in use\n  try  free managed buffers, or raise the cap; on a machine without coherent memory only "
            "--force-oversubscription does that"
        )


class UsedAfterForkError(UnifiedMemoryError):
    """CUDA, and with it all managed memory, does not survive a fork."""

    def __init__(self) -> None:
        super().__init__(
            "managed memory was used in a forked child, where CUDA does not exist\n"
            "  try  start workers as threads, or with the multiprocessing start method 'spawn'"
        )


class DriverTooOldError(UnifiedMemoryError):
    """The driver does not export a function that came with a later CUDA."""

    def __init__(self, function: str) -> None:
        self.function = function
        super().__init__(
            f"this CUDA driver has no {function}\n  try  a newer driver; `gracetune doctor` shows the installed one"
        )


class MemoryPressure(GracetuneError):  # noqa: N818 - a state of the machine, and the name the documents use
    """Main memory is about to run out under the GPU's overflow. Raised while there is still room to save."""

    def __init__(self, *, headroom: int, reserve: int, arena_active: int | None) -> None:
        self.headroom, self.reserve, self.arena_active = headroom, reserve, arena_active
        overflow = "an unknown amount" if arena_active is None else format_bytes(arena_active)
        problem = Problem(
            key="main memory is nearly exhausted while the GPU's overflow lies in it",
            found=f"{format_bytes(headroom)} left after everything cold was given up; the overflow holds {overflow}",
            expected=f"at least the reserve of {format_bytes(reserve)}",
            hint="--set training.gradient_checkpointing=full, a smaller training.batch_size or resolution, "
            "or caches on disk: --set cache.vae_cache_type=disk --set cache.text_cache_type=disk",
        )
        super().__init__(str(problem))


class CacheWrittenError(UnifiedMemoryError):
    """A step wrote into a batch that is a view of the cache: every later epoch would train on what it wrote."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"a step wrote into {', '.join(names)} of its batch, which is read in place from the cache\n"
            "  expected  batch tensors that are only read\n"
            "  try  clone the tensor in the model family's `predict` before changing it"
        )
