"""Tools for experiments on a GPU: timing, and simulating a GPU with less memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def torch_device(index: int) -> torch.device:
    import torch

    return torch.device("cuda", index)


def synchronize(device: int) -> None:
    import torch

    torch.cuda.synchronize(device)


def timed_ms(work: Callable[[], object], device: int) -> float:
    """Wall time of `work`, from an idle GPU until the GPU has finished it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - start) * 1000


def tidy(device: int) -> int:
    """Free cached GPU memory. Returns the bytes that PyTorch still holds."""
    import torch

    gc.collect()
    synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


@contextmanager
def small_gpu(device: int, *, room: int) -> Iterator[None]:
    """Limit torch to `room` bytes more than it holds now, including an overflow arena."""
    import torch

    held = tidy(device)
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction((held + room) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
