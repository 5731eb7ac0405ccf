"""Sampling with the averages of a schedule-free optimizer does not change the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gracetune.optim.averages import averaged

BETA = 0.9


class Averaging(SGD):
    """Switches between weights as schedule-free optimizers do: x = y + (z - y) (1 - 1 / beta), and back from x."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.start = [one.detach().clone() for one in self.param_groups[0]["params"]]

    def eval(self) -> None:
        self._move(1 - 1 / BETA)

    def train(self) -> None:
        self._move(1 - BETA)

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for one, start in zip(self.param_groups[0]["params"], self.start, strict=True):
            one.lerp_(start, weight)


def after_a_step() -> tuple[nn.Linear, Averaging]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = Averaging(model.parameters())
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_values_are_restored_exactly_although_the_optimizer_rounds() -> None:
    model, optimizer = after_a_step()
    trained = model.weight.detach().clone()
    optimizer.eval()
    optimizer.train()
    assert not torch.equal(model.weight, trained), "this optimizer shows nothing"
    with torch.no_grad():
        model.weight.copy_(trained)
    with averaged(optimizer):
        assert not torch.allclose(model.weight, trained)
    assert torch.equal(model.weight, trained)


def test_values_are_restored_after_an_error() -> None:
    model, optimizer = after_a_step()
    trained = model.weight.detach().clone()
    with pytest.raises(RuntimeError), averaged(optimizer):
        raise RuntimeError
    assert torch.equal(model.weight, trained)


def test_other_optimizers_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with averaged(SGD(model.parameters(), lr=0.1)):
        assert torch.equal(model.weight, before)
