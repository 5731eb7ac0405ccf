"""EMA follows the parameters by its rule, and sampling with averages does not change the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from gracetune.config.run_config import Ema as EmaConfig
from gracetune.errors import GracetuneError
from gracetune.optim.averages import EmaWeights, averaged


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(3, 2, generator=draw).to(dtype).requires_grad_() for name in ("a", "b")}


@torch.no_grad()
def move(held: dict[str, torch.Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in held.values():
        parameter.add_(torch.randn(3, 2, generator=draw).to(parameter.dtype))


@given(st.floats(0.01, 0.9999), st.integers(1, 4), st.integers(0, 12), st.booleans(), st.integers(0, 6))
def test_follows_its_formula(decay: float, every: int, steps: int, ramp: bool, copied: int) -> None:
    held = parameters()
    ema = EmaWeights(held, decay=decay, update_every=every, ramp=ramp, copy_until=copied)
    expected = {name: parameter.detach().double() for name, parameter in held.items()}
    for step in range(1, steps + 1):
        move(held, step)
        ema.update()
        kept = decay
        if copied:
            kept = 0.0 if step < copied else decay
        elif ramp:
            kept = 0.0 if step == 1 else min(decay, step / (step + 9))
        if step % every == 0:
            expected = {name: kept * expected[name] + (1 - kept) * held[name].detach().double() for name in held}
    for name, average in ema.averages.items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_small_changes_of_bf16_parameters_are_not_lost() -> None:
    held = {"a": torch.ones(4, dtype=torch.bfloat16)}
    ema = EmaWeights(held, decay=0.999)
    held["a"].add_(1.0)
    for _ in range(100):
        ema.update()
    assert ema.averages["a"].dtype == torch.float32
    torch.testing.assert_close(ema.averages["a"], torch.full((4,), 2 - 0.999**100), rtol=1e-4, atol=0)


def fail_inside(ema: EmaWeights) -> None:
    with ema.swapped():
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_puts_in_the_averages_and_restores_every_bit(dtype: torch.dtype) -> None:
    held = parameters(dtype)
    ema = EmaWeights(held, decay=0.9)
    move(held, 1)
    ema.update()
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    with ema.swapped():
        for name, parameter in held.items():
            assert torch.equal(parameter, ema.averages[name].to(dtype))
            assert not torch.equal(parameter, before[name])
            assert parameter.requires_grad
    assert all(torch.equal(held[name], before[name]) for name in held)
    with pytest.raises(RuntimeError, match="in the middle"):
        fail_inside(ema)
    assert all(torch.equal(held[name], before[name]) for name in held)


def test_resumes_to_the_bit() -> None:
    whole, first = parameters(), parameters()
    uninterrupted, ema = EmaWeights(whole, decay=0.9, update_every=2), EmaWeights(first, decay=0.9, update_every=2)
    for step in range(7):
        move(whole, step)
        uninterrupted.update()
    for step in range(3):
        move(first, step)
        ema.update()
    resumed = EmaWeights(first, decay=0.9, update_every=2)
    resumed.load_named_state(dict(ema.averages), ema.steps)
    for step in range(3, 7):
        move(first, step)
        resumed.update()
    assert all(torch.equal(resumed.averages[name], uninterrupted.averages[name]) for name in whole)


def test_state_of_other_parameters_is_rejected_and_changes_nothing() -> None:
    ema = EmaWeights(parameters(), decay=0.9)
    before = {name: average.clone() for name, average in ema.averages.items()}
    state = {"a": torch.zeros(3, 3), "c": torch.zeros(3, 2)}
    with pytest.raises(GracetuneError) as caught:
        ema.load_named_state(state, 3)
    for words in ("missing (1): b", "unexpected (1): c", "different (1): a ((3, 3) instead of (3, 2))"):
        assert words in str(caught.value)
    assert all(torch.equal(before[name], average) for name, average in ema.averages.items())


def test_is_built_from_the_config() -> None:
    assert EmaWeights.from_config(parameters(), EmaConfig()) is None
    made = EmaWeights.from_config(parameters(), EmaConfig(enabled=True, decay=0.5, update_every=3))
    assert made is not None
    assert (made.decay, made.update_every) == (0.5, 3)


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
