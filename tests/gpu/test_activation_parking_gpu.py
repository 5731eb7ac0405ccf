"""Inputs of repeated blocks in pinned memory: the same gradients, less memory, copies beside the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gracetune.models.activation_parking import ActivationParking
from gracetune.units import MIB

pytestmark = pytest.mark.gpu

BLOCKS, ROWS, WIDTH = 24, 8192, 2048
SIZE = 2 * ROWS * WIDTH
"""Of one block's input: 32 MiB."""


class Chain(nn.Module):
    def __init__(self, repeat: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, **kind), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, **kind))
            for _ in range(BLOCKS)
        )
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.repeat(layer, x)
        return x.float().square().mean()


def plainly(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def step(model: nn.Module, seed: int) -> int:
    """Leaves its gradients in the parameters. The most memory held above what was there before.

    Active, not allocated bytes: those count what was freed but has to wait for a copy on another stream.
    """
    model.zero_grad(set_to_none=False)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    model(x).backward()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"] - before)


def gradients(model: nn.Module) -> list[Tensor]:
    """The parameters' own: a copy would be as large as all of the memory that parking saves."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_same_gradients_with_less_memory_and_hidden_copies() -> None:
    parking = ActivationParking.on(torch.device("cuda", 0))
    ours, theirs = Chain(parking.checkpoint), Chain(plainly)
    for model in (ours, theirs):
        step(model, 0)  # gradients exist from here on, and no step allocates them
    assert len(gradients(ours)) == len(gradients(theirs)) == 4 * BLOCKS
    for seed in range(1, 4):
        held, whole = step(ours, seed), step(theirs, seed)
        assert all(torch.equal(*pair) for pair in zip(gradients(ours), gradients(theirs), strict=True))
        # The chain keeps no output of its blocks beside their inputs; half is far from what parking leaves.
        assert whole - held > (BLOCKS // 2) * SIZE, (held / MIB, whole / MIB)
    step(ours, 4)
    stats = parking.stats
    assert stats.returned > 0
    print(f"peak of a step {held / MIB:.0f} MiB, without parking {whole / MIB:.0f} MiB; {stats.line}")
