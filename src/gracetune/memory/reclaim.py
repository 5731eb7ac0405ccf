"""Reclaiming memory that torch, the C library and Python only keep for later use.

Also a context manager that makes Python's garbage collector run less often.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_MANY = 100_000
"""Number of new objects that triggers a collection. Examining that many takes about 5 ms."""


class Demoter(Protocol):
    """The owner of the managed buffers."""

    def demote_cold(self, *, at_most: int, include_recent: bool) -> int | None:
        """Migrate up to `at_most` bytes of cold managed buffers to main memory.

        With `include_recent`, recently used buffers are candidates too. Returns the bytes migrated; None if unknown.
        """
        ...


class TorchReclaimer:
    """Implements `governor.Reclaimer` for one GPU."""

    def __init__(self, device: int, demoter: Demoter) -> None:
        self._device = device
        self._demoter = demoter

    def synchronize(self) -> None:
        import torch

        if torch.cuda.is_initialized():  # otherwise there is no work to wait for
            torch.cuda.synchronize(self._device)

    def release_device_cache(self) -> int:
        import torch

        before = torch.cuda.memory_reserved(self._device)
        gc.collect()  # frees tensors in reference cycles, which still hold their blocks
        torch.cuda.empty_cache()
        return max(0, before - torch.cuda.memory_reserved(self._device))

    def release_host_caches(self) -> None:
        import torch

        # Demoting buffers fills main memory; releasing torch's pinned blocks and the C heap makes space for them.
        if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        trim_heap()

    def demote_cold(self, *, at_most: int, include_recent: bool) -> int | None:
        return self._demoter.demote_cold(at_most=at_most, include_recent=include_recent) if at_most > 0 else 0


def trim_heap() -> None:
    """Return the C library's free pages to the kernel. musl lacks this call, but keeps few free pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make Python's garbage collector run less often, for code that creates many objects and keeps nearly all of them.

    By default Python searches for reference cycles after every 700 new objects, and now and then among all objects of
    the process. Indexing 30,000 samples caused more than ten full collections that found nothing. With torch and
    diffusers imported, each takes 0.4 seconds. Garbage is still collected, only later.
    """
    before = gc.get_threshold()
    if before[0] >= _MANY or not before[0]:  # another thread is in this context manager, or collection is disabled
        yield
        return
    gc.set_threshold(_MANY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
