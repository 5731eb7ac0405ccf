"""What a reclamation does on a machine with torch: give back everything that is only kept for later."""

from __future__ import annotations

import ctypes
import gc
from typing import Protocol


class Demoter(Protocol):
    """The owner of the managed buffers."""

    def demote_cold(self, *, at_most: int, everything: bool) -> int | None:
        """Send up to `at_most` bytes of managed buffers nobody is about to use to main memory.

        `everything` counts those as cold too that were used a moment ago. Returns the bytes sent; None: unknown.
        """
        ...


class TorchReclaimer:
    """Fills `governor.Reclaimer` for one GPU."""

    def __init__(self, device: int, demoter: Demoter) -> None:
        self._device = device
        self._demoter = demoter

    def synchronize(self) -> None:
        import torch

        if torch.cuda.is_initialized():  # a GPU that nobody has used has nothing to wait for
            torch.cuda.synchronize(self._device)

    def release_device_cache(self) -> int:
        import torch

        before = torch.cuda.memory_reserved(self._device)
        gc.collect()  # a tensor in a reference cycle holds its block until then
        torch.cuda.empty_cache()
        return max(0, before - torch.cuda.memory_reserved(self._device))

    def release_host_caches(self) -> None:
        import torch

        # Demoting buffers fills main memory; these two are what empties it.
        if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        trim_heap()

    def demote_cold(self, *, at_most: int, everything: bool) -> int | None:
        return self._demoter.demote_cold(at_most=at_most, everything=everything) if at_most > 0 else 0


def trim_heap() -> None:
    """Return the C library's free pages to the kernel; musl has no such call, and keeps few."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
