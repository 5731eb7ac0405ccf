"""Training with overflow: equal losses, the expected memory stages, no leak, and no cost when idle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Final

from gracetune.bench.row import BenchRow
from gracetune.config.memory_options import MemoryOptions
from gracetune.errors import MachineError
from gracetune.hardware.machine import Machine
from gracetune.memory.experiment_tools import small_gpu, tidy, timed_ms
from gracetune.memory.native import Unavailable
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch

ARENA: Final = 2 * GIB
SMALL, LARGE = 4, 32
BATCH_SIZES: Final = (SMALL,) * 4 + (LARGE,) * 6 + (SMALL,) * 8
"""Batch sizes that fit, do not fit, and fit again: memory stages 1, 2 and 1."""


@dataclass(frozen=True)
class SpillTrace:
    losses: tuple[float, ...]
    memory_stages: tuple[int, ...]
    """The governor's stage after each step. Empty for a run without the layer."""
    peak: int
    """Peak bytes, including model and optimizer."""


class _TrainedModel:
    """A small transformer with AdamW. Batches depend only on their index."""

    def __init__(self, device: int) -> None:
        import torch

        torch.manual_seed(0)
        self.device = torch.device("cuda", device)
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, device=self.device)
        self.model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.count = 0

    def step(self, size: int) -> torch.Tensor:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        generator = torch.Generator(self.device).manual_seed(self.count)
        self.count += 1
        tokens = torch.randn(size, 256, 512, device=self.device, generator=generator)
        with sdpa_kernel(SDPBackend.MATH):  # a deterministic backend, and the same in both runs
            loss: torch.Tensor = (self.model(tokens) - tokens.roll(1, 0)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def spill_rows(machine: Machine, device: int) -> Iterator[BenchRow]:
    """Run the same training twice, once with too little GPU memory for the large batches."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        unlimited = _train(device, None, BATCH_SIZES)
        room = int(_train(device, None, (SMALL,) * 3).peak * 1.35)  # the small batches fit with enough to spare
        before = tidy(device)
        layer = _open(machine, device, most_arena_bytes=ARENA)
        with small_gpu(device, room=room):
            spilled = _train(device, layer, BATCH_SIZES)
        stats = layer.uvm_stats()
        layer.close()
    finally:
        torch.use_deterministic_algorithms(False)
    leaked = tidy(device) - before + layer.managed_bytes
    same = sum(mine == theirs for mine, theirs in zip(spilled.losses, unlimited.losses, strict=True))
    sizes = f"peak of the unlimited run {format_bytes(unlimited.peak)}, GPU limited to {format_bytes(room)}"
    yield BenchRow(
        "spilled_losses_equal", same, f"of {len(unlimited.losses)}", "all", same == len(unlimited.losses), sizes
    )
    seen = [memory_stage for memory_stage, _ in groupby(spilled.memory_stages)]
    detail = (
        f"{' '.join(map(str, spilled.memory_stages))}; {stats.light_reclamations} light, {stats.hard_reclamations} hard"
    )
    counted = seen == [1, 2, 1] and (stats.transitions, stats.light_reclamations) == (2, 1)
    yield BenchRow("stages", stats.transitions, "transitions", "1 -> 2 -> 1", counted, detail)
    peak = stats.arena_peak_bytes
    yield BenchRow("arena_peak", peak / MIB, "MiB", "> 0", peak > 0, f"{stats.refused} allocations rejected")
    yield BenchRow("leaked", leaked / MIB, "MiB", "0", leaked == 0)


def overhead_rows(machine: Machine, device: int) -> Iterator[BenchRow]:
    """Step time with and without the governor's check after each step.

    Rounds alternate, so that GPU clocks drift alike.
    """
    layer = _open(machine, device, most_arena_bytes=256 * MIB)
    trained_model = _TrainedModel(device)
    steps = 12

    def epoch(governed: bool) -> None:
        for _ in range(steps):
            trained_model.step(2 * LARGE)  # long enough to be GPU-bound, not launch-bound
            if governed:
                layer.step()

    epoch(True)
    pairs = [(timed_ms(lambda: epoch(False), device), timed_ms(lambda: epoch(True), device)) for _ in range(8)]
    plain, governed = (median(times) / steps for times in zip(*pairs, strict=True))
    start = time.perf_counter()
    for _ in range(100):
        layer.step()
    sample_ms = (time.perf_counter() - start) * 1000 / 100
    layer.close()
    cost = governed / plain - 1
    detail = f"step {plain:.2f} ms, with the layer {governed:.2f} ms; one sample takes {sample_ms:.3f} ms of the host"
    yield BenchRow("overhead_when_idle", cost * 100, "% of step", "< 1", cost < 0.01, detail)


def _open(machine: Machine, device: int, *, most_arena_bytes: int) -> UnifiedMemory:
    layer = UnifiedMemory.open(MemoryOptions(use_uvm=True), machine, device=device, most_arena_bytes=most_arena_bytes)
    if isinstance(layer, Unavailable):
        raise MachineError(f"unified memory is {layer}")
    return layer


def _train(device: int, layer: UnifiedMemory | None, sizes: tuple[int, ...]) -> SpillTrace:
    import torch

    base = tidy(device)
    torch.cuda.reset_peak_memory_stats(device)
    trained_model = _TrainedModel(device)
    losses: list[torch.Tensor] = []
    memory_stages: list[int] = []
    for size in sizes:
        losses.append(trained_model.step(size))
        if layer is not None:
            layer.step()
            memory_stages.append(layer.uvm_stats().stage)
    peak = torch.cuda.max_memory_reserved(device) - base
    return SpillTrace(tuple(torch.stack(losses).tolist()), tuple(memory_stages), peak)
