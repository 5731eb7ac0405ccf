"""Automagic on every adapter kind of a tiny denoiser, with separate limits for each expert."""

from __future__ import annotations

import pytest
import torch

from gracetune.config.run_config import Optimizer as Requested
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import build_optimizer, load_named_state, named_state, parameter_names
from gracetune.optim.record import ParamGroup
from unit.adapters.denoisers import ADAPTERS, TinyModel, load

REQUESTED = Requested.model_validate(
    {
        "name": "automagic",
        "lr": 1e-3,
        "limits": {"lr_bump": 1e-4, "max_lr": 2e-2},
        "high_noise": {"max_lr": 1.5e-3},
        "low_noise": {"lr_bump": 5e-4, "min_lr": 1e-3},
    }
)


EVERYDAY = ("lora", "lokr")
CASES = [
    pytest.param(kind, family, marks=() if kind in EVERYDAY and family == "wan" else pytest.mark.full)
    for family in ("wan", "sdxl")
    for kind in ADAPTERS
]


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_trains_within_each_experts_limits(kind: str, family: str, tiny_model: TinyModel) -> None:
    experts = [load(tiny_model, family) for _ in range(2)]
    attached = [expert.attach(kind, seed=at) for at, expert in enumerate(experts)]
    groups = [
        ParamGroup("high_noise", "high_noise", attached[0].parameters()),
        ParamGroup("low_noise", "low_noise", attached[1].parameters()),
    ]
    optimizer = build_optimizer(REQUESTED, groups)
    assert isinstance(optimizer, Automagic)
    wanted = torch.randn(experts[0]().shape, generator=torch.Generator().manual_seed(5))
    losses: list[list[float]] = [[], []]
    for step in range(16):
        turn = step // 2 % 2  # the idle expert has no gradient
        loss = (experts[turn]() - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[turn].append(loss.item())
    assert all(some[-1] < some[0] for some in losses)

    found: dict[str, list[float]] = {}
    for group, rule, stack in optimizer._stacks:
        found.setdefault(group["name"], []).extend(rule.grid.read(stack.rates).flatten().tolist())
    # Eight updates each. The first has no previous sign, so the low expert's rates can rise seven times.
    assert max(found["high_noise"]) == pytest.approx(1.5e-3)
    assert max(found["low_noise"]) == pytest.approx(1e-3 + 7 * 5e-4, rel=1e-3)
    assert min(found["low_noise"]) >= 1e-3 * (1 - 1e-6)

    names = parameter_names(groups)
    saved = named_state(optimizer, names)
    assert {key.rpartition(":")[0] for key in saved.tensors} == set(names)
    other = build_optimizer(REQUESTED, groups)
    load_named_state(other, names, saved)
    assert all(torch.equal(saved.tensors[key], now) for key, now in named_state(other, names).tensors.items())
