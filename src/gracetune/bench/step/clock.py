"""Measure time and memory of a step, and the matrix-product ceiling of the device."""

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
from gracetune.bench.step.power import GpuPower
from gracetune.errors import GracetuneError
from gracetune.models.footprint import FP8_CAPABILITY

_FEWEST: Final = 3
_WARM_S: Final = 5.0
_ROUNDS: Final = 12
_PRODUCTS: Final = 10
_FP8_MOST: Final = 448.0
"""Largest finite value of e4m3."""


@dataclass(frozen=True)
class Pace:
    """Timings of a step."""

    samples_ms: tuple[float, ...]
    first_s: float
    """Seconds of the first step, which includes compiling and choosing kernels."""
    peak_bytes: int | None
    """Peak of torch's memory counter, including the first step; None without a GPU."""
    loss: float
    """Loss per sample of the last step."""
    joules: float | None = None
    """Energy of the GPU for one timed step, the mean; None if it is unknown."""
    clock_mhz: int | None = None
    """Clock of the GPU at the end of the timed steps."""

    @property
    def ms(self) -> float:
        return median(self.samples_ms)

    @property
    def once_s(self) -> float:
        """Seconds of one-time work in the first step."""
        return max(0.0, self.first_s - self.ms / 1000)


def measure(
    step: Callable[[], Tensor], device: torch.device, samples: int, *, within_s: float | None = None
) -> Pace:  # fmt: skip
    """Time `samples` steps after a warm-up.

    `step` returns its loss, which is read only at the end; a non-finite loss is an error, since its times mean nothing.
    With `within_s` there are fewer samples (at least three) if they would take longer.
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
    power = GpuPower.of(device)
    before = None if power is None else power.joules()  # the warm-up has just synchronized
    marks = [mark(device)]
    for _ in range(samples):
        loss = step()
        marks.append(mark(device))
    clock_mhz = None if power is None else power.clock_mhz()  # while the GPU still computes the last steps
    synchronize(device)
    after = None if power is None else power.joules()
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    last = float(loss)
    if not math.isfinite(last):
        raise GracetuneError(f"the loss of the last step is {last}: what was timed is no training")
    times = tuple(between(one, two) for one, two in pairwise(marks))
    joules = None if before is None or after is None else (after - before) / samples
    return Pace(times, first, peak, last, joules, clock_mhz)


def _warmed_up(step: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Warm up, and return the last loss and the seconds per step. One long step (video) is warm-up enough."""
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
    """A timestamp. On a GPU it is a CUDA event, so the host does not synchronize."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(one: torch.cuda.Event | float, two: torch.cuda.Event | float) -> float:
    """Milliseconds between two marks."""
    if isinstance(one, float) and isinstance(two, float):
        return 1000 * (two - one)
    assert isinstance(one, torch.cuda.Event)
    assert isinstance(two, torch.cuda.Event)
    return float(one.elapsed_time(two))


def free(device: torch.device) -> int:
    """Free cached memory, and return the bytes that are still allocated."""
    torch._dynamo.reset()
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


# -- matrix-product ceilings -------------------------------------------------------------------------------------------


def ceilings(shape: Gemm, device: torch.device) -> dict[str, float]:
    """TFLOP/s of one product of this shape, by precision. Unsupported precisions are missing."""
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
    """An e4m3 product with a scale for each row of both operands, as in the frozen layers; None if unsupported."""
    sides = (shape.rows, shape.inputs, shape.outputs)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return None
    if any(side % 16 for side in sides):  # a requirement of torch._scaled_mm
        return None
    x, x_scale = _quantized(torch.randn(shape.rows, shape.inputs, device=device))
    weight, weight_scale = _quantized(torch.randn(shape.outputs, shape.inputs, device=device))
    return lambda: torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor.abs().amax(1, keepdim=True) / _FP8_MOST
    return (tensor / scale).to(torch.float8_e4m3fn), scale.float()
