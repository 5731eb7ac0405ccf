"""Time and memory of a step, and how fast this device multiplies at best."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

import torch
from torch import Tensor

from gracetune.bench.step.flops import Gemm
from gracetune.bench.step.job import WARM_UP
from gracetune.errors import GracetuneError
from gracetune.models.footprint import FP8_CAPABILITY

_FEWEST: Final = 3
_WARM_S: Final = 5.0
_ROUNDS: Final = 12
_PRODUCTS: Final = 10
_FP8_MOST: Final = 448.0
"""The largest number e4m3 has."""


@dataclass(frozen=True)
class Pace:
    samples_ms: tuple[float, ...]
    first_s: float
    """The first step: compiling, choosing kernels, and the step itself."""
    peak_bytes: int | None
    """torch's counter, from the first step on; None without a GPU."""
    loss: float
    """Of the last step, per sample."""

    @property
    def ms(self) -> float:
        return median(self.samples_ms)

    @property
    def once_s(self) -> float:
        """What happens only once."""
        return max(0.0, self.first_s - self.ms / 1000)


def measure(
    step: Callable[[], Tensor], device: torch.device, samples: int, *, within_s: float | None = None
) -> Pace:  # fmt: skip
    """`step` gives its loss, which is read only at the end. A loss that is no number makes the times worth nothing.

    `within_s`: fewer samples where so many would take longer, three at least.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - began
    loss, second = _warmed_up(step, device)
    if within_s is not None:
        samples = min(samples, max(_FEWEST, int(within_s / second)))
    marks = [mark(device)]
    for _ in range(samples):
        loss = step()
        marks.append(mark(device))
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    last = float(loss)
    if not math.isfinite(last):
        raise GracetuneError(f"the loss of the last step is {last}: what was timed is no training")
    times = tuple(between(one, two) for one, two in pairwise(marks))
    return Pace(times, first, peak, last)


def _warmed_up(step: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """The last loss, and the seconds of a step. Steps that take long (video) have nothing left to warm after one."""
    began, steps = time.perf_counter(), 0
    while steps < WARM_UP and time.perf_counter() - began <= _WARM_S:
        loss = step()
        synchronize(device)
        steps += 1
    return loss, (time.perf_counter() - began) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> torch.cuda.Event | float:
    """A moment: on the device's own clock where it has one, so that the host is never waited for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(one: torch.cuda.Event | float, two: torch.cuda.Event | float) -> float:
    if isinstance(one, float) and isinstance(two, float):
        return 1000 * (two - one)
    assert isinstance(one, torch.cuda.Event)
    assert isinstance(two, torch.cuda.Event)
    return float(one.elapsed_time(two))


def free(device: torch.device) -> int:
    """Let go of everything that is only cached; the bytes that are still held."""
    torch._dynamo.reset()
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


# -- how fast it multiplies -------------------------------------------------------------------------------------------


def ceilings(shape: Gemm, device: torch.device) -> dict[str, float]:
    """TFLOP/s of one product of this shape by precision; what the device or torch cannot do is not in it."""
    found = {"bf16": _rate(shape, device, _bf16_product(shape, device))}
    product = _fp8_product(shape, device)
    if product is not None:
        found["fp8"] = _rate(shape, device, product)
    return found


def _rate(shape: Gemm, device: torch.device, product: Callable[[], object]) -> float:
    count = _PRODUCTS if device.type == "cuda" else 1
    times = []
    for _ in range(_ROUNDS):
        start = mark(device)
        for _ in range(count):
            product()
        end = mark(device)
        synchronize(device)
        times.append(between(start, end) / count)
    return shape.flops / median(times[_ROUNDS // 3 :]) / 1e9


def _bf16_product(shape: Gemm, device: torch.device) -> Callable[[], object]:
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.outputs, shape.inputs, device=device, dtype=torch.bfloat16)
    return lambda: torch.nn.functional.linear(x, weight)


def _fp8_product(shape: Gemm, device: torch.device) -> Callable[[], object] | None:
    """e4m3 with a scale for each row of both operands, as the frozen layers use it."""
    sides = (shape.rows, shape.inputs, shape.outputs)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return None
    if any(side % 16 for side in sides):
        return None
    x, x_scale = _quantised(torch.randn(shape.rows, shape.inputs, device=device))
    weight, weight_scale = _quantised(torch.randn(shape.outputs, shape.inputs, device=device))
    return lambda: torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor.abs().amax(1, keepdim=True) / _FP8_MOST
    return (tensor / scale).to(torch.float8_e4m3fn), scale.float()
