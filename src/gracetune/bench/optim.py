"""`gracetune bench optim`: the duration of an Automagic step relative to torch's fused AdamW, within one run.

On a GPU it uses 100 million adapter parameters in the shapes of a rank-16 LoRA on Wan's linears, and has a bar. Without
a GPU it uses a few million and has none. Gradients are random, both optimizers are warmed up, and the first steps,
which compile, are reported separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from gracetune.bench.row import BenchRow
from gracetune.hardware.machine import Machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

BAR: Final = 3.0
RANK: Final = 16
_BLOCK: Final = (*((5120, 5120),) * 8, (5120, 13824), (13824, 5120))
"""(inputs, outputs) of the linears of one Wan 14B block."""


@dataclass(frozen=True)
class OptimBenchSizes:
    """Size of the experiment; tests use smaller ones."""

    parameters: int
    rounds: int = 30
    warmup: int = 5


def run(machine: Machine, sizes: OptimBenchSizes | None = None) -> list[BenchRow]:
    import torch

    on_gpu = bool(machine.gpus) and torch.cuda.is_available()
    sizes = sizes or (OptimBenchSizes(100_000_000) if on_gpu else OptimBenchSizes(4_000_000, rounds=5, warmup=2))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return [*rows(device, sizes)]


def lora_shapes(parameters: int) -> Iterator[tuple[int, int]]:
    """Shapes of a LoRA's matrices, block after block, until they have at least `parameters` elements."""
    total = 0
    while True:
        for inputs, outputs in _BLOCK:
            for shape in ((RANK, inputs), (outputs, RANK)):
                if total >= parameters:
                    return
                total += shape[0] * shape[1]
                yield shape


def rows(device: torch.device, sizes: OptimBenchSizes) -> Iterator[BenchRow]:
    import torch

    from gracetune.optim.automagic import Automagic

    generator = torch.Generator(device).manual_seed(0)
    parameters = [
        torch.randn(shape, device=device, generator=generator).mul_(0.02).requires_grad_()
        for shape in lora_shapes(sizes.parameters)
    ]
    count = sum(parameter.numel() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator).mul_(1e-3)
    adamw = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    automagic = Automagic([(str(at), parameter) for at, parameter in enumerate(parameters)])
    first = [_ms(optimizer.step, device) for optimizer in (adamw, automagic)]
    held = _begin_peak(device)  # parameters, gradients and the state of both optimizers
    times = _in_turns(adamw, automagic, parameters, device, sizes)
    theirs, ours = (median(some) for some in zip(*times, strict=True))
    ratio = median(own / other for other, own in times)
    detail = (
        f"Automagic {ours:.2f} ms, fused AdamW {theirs:.2f} ms; {count / 1e6:.1f} M elements in {len(parameters)} "
        f"tensors of rank {RANK}, fp32; torch {torch.__version__}; first steps {first[1]:.0f} and {first[0]:.0f} ms"
    )
    on_gpu = device.type == "cuda"
    yield BenchRow(
        "automagic_over_adamw",
        ratio,
        "ratio",
        f"<= {BAR:g}" if on_gpu else "",
        ratio <= BAR if on_gpu else None,
        detail,
    )
    if on_gpu:
        yield BenchRow(
            "extra_memory",
            (_peak(device) - held) / 2**20,
            "MiB",
            detail="beyond both states, at the peak of both steps",
        )


def _in_turns(
    adamw: Optimizer, automagic: Optimizer, parameters: list[Tensor], device: torch.device, sizes: OptimBenchSizes
) -> list[tuple[float, float]]:
    """Milliseconds of an (AdamW, Automagic) step in each round after the warm-up. Both are timed in every round, so
    that other programs slow both down alike."""
    times = []
    for round_ in range(sizes.warmup + sizes.rounds):
        # Flip signs in every other round, so that rates move up and down as in training.
        if round_ % 2:
            for parameter in parameters[::3]:
                assert parameter.grad is not None
                parameter.grad.neg_()
        pair = (_ms(adamw.step, device), _ms(automagic.step, device))
        if round_ >= sizes.warmup:
            times.append(pair)
    return times


def _ms(work: Callable[[], object], device: torch.device) -> float:
    """Wall time until the device has finished. Launching kernels is part of a step's cost."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return (time.perf_counter() - start) * 1000


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _begin_peak(device: torch.device) -> int:
    """Bytes in use now. `_peak` counts from here on."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    """Peak bytes since `_begin_peak`."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
