"""On a GPU: streamed states give the bits of resident ones, while copies and updates run beside training."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from gracetune.config.run_config import StatePrecision
from gracetune.optim.chunked_adamw import RESIDENT, ChunkedAdamW, StateChoice
from gracetune.optim.weight_waits import wait_in
from gracetune.train.gradients import GradientClipping, SummedGradients

WIDTH, BLOCKS, STEPS = 1024, 8, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.nn.functional.gelu(self.one(x)))  # type: ignore[no-any-return]


def trained(precision: StatePrecision, resident: int, bad: int) -> list[Tensor]:
    """The weights after some steps, of which one has a gradient that is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to("cuda", torch.bfloat16)
    state = StateChoice(precision, resident, slots=3, chunk_elements=3 << 20)
    optimizer = ChunkedAdamW([{"params": [*model.named_parameters()]}], lr=1e-3, state=state)
    wait_in(model, ["Block"], optimizer)
    sums = SummedGradients(optimizer.sums[0], load_ahead=lambda: optimizer.load_ahead(0))
    for step in range(STEPS):
        sums.open()
        for part in range(2):
            generator = torch.Generator("cuda").manual_seed(2 * step + part)
            x = torch.randn(256, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
            factor = float("inf") if step == bad else 1.0
            (model(x).float().square().mean() * factor).backward()
        norm = sums.finish(0.5, GradientClipping())
        optimizer.found_inf = (~norm.isfinite()).float()
        optimizer.step()
        sums.close()
    optimizer.wait_for_all()
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("precision", get_args(StatePrecision))
def test_streamed_and_resident_states_give_the_same_bits(precision: StatePrecision) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        resident = trained(precision, RESIDENT, bad=7)
        streamed = trained(precision, 0, bad=7)
        mixed = trained(precision, 100 << 20, bad=7)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, two) for one, two in zip(resident, streamed, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(resident, mixed, strict=True))
    assert all(one.isfinite().all() for one in resident)
