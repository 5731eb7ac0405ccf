"""What a reclamation does on a machine with torch: give back everything that is only kept for later.

Also when Python's garbage collector had better wait.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_MANY = 100_000
"""New objects; looking at these alone takes about 5 ms."""


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


@contextmanager
def rare_collections() -> Iterator[None]:
    """For code that makes very many objects, nearly all of which stay: Python looks for garbage less often inside.

    By default every 700 new objects are a reason to look for cycles among the young ones, and from time to time among
    all objects of the process. The index of 30,000 samples made it look at all of them more than ten times and find
    nothing; with torch and diffusers imported one such look takes 0.4 seconds. Garbage is still found, only later.
    """
    before = gc.get_threshold()
    if before[0] >= _MANY or not before[0]:  # another thread is in here, or nothing is collected anyway
        yield
        return
    gc.set_threshold(_MANY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
