"""Tools for experiments on a GPU: the clock, and a GPU made small."""

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
    """Host time around work that the GPU has finished."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - start) * 1000


def tidy(device: int) -> int:
    """Let go of everything that is only cached; the bytes PyTorch still holds from the GPU."""
    import torch

    gc.collect()
    synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


@contextmanager
def small_gpu(device: int, *, room: int) -> Iterator[None]:
    """Let torch believe that the GPU ends `room` bytes above what it holds now, an overflow arena included."""
    import torch

    held = tidy(device)
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction((held + room) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
