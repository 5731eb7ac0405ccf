"""GELU by a sigmoid: equal to torch's tanh approximation, and diffusers' own code if no graph is compiled."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gracetune import kernels
from gracetune.models.common import gelu
from gracetune.models.common.gelu import PlainSigmoidGelu, SigmoidGelu, gelu_by_sigmoid, use_sigmoid


def with_gradient(function: Any, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    answer = function(x)
    return [answer.detach(), *torch.autograd.grad(answer, x, gradient.to(answer.dtype))]


def by_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


finite = st.floats(-60.0, 60.0, width=32)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=50))
def test_value_and_gradient_equal_torchs(pairs: list[tuple[float, float]]) -> None:
    x, gradient = (torch.tensor(values) for values in zip(*pairs, strict=True))
    exact = with_gradient(by_tanh, x.double(), gradient)
    found = with_gradient(gelu_by_sigmoid, x, gradient)
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=2e-6, atol=2e-6 * float(gradient.abs().max() + 1))


@pytest.mark.parametrize("dtype", kernels.HALF_DTYPES)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 4001).to(dtype)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = with_gradient(by_tanh, x.double(), gradient.double())
    half = torch.finfo(dtype).eps / 2
    for found, wanted in zip(with_gradient(gelu_by_sigmoid, x, gradient), exact, strict=True):
        assert found.dtype == dtype
        # Near a zero of the slope, fp32 before the rounding limits the precision, as it does for torch.
        assert ((found.double() - wanted).abs() <= 1.01 * half * wanted.abs() + 2e-6).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_nan_propagates(value: float) -> None:
    assert not gelu_by_sigmoid(torch.tensor([value])).isfinite().any()


def test_only_tanh_gelus_are_replaced_and_weights_keep_their_names() -> None:
    model = nn.ModuleList([GELU(4, 8, approximate="tanh"), GELU(4, 8), nn.GELU(approximate="tanh"), nn.GELU()])
    before = list(model.state_dict())
    use_sigmoid(model)
    assert [type(one) for one in model] == [SigmoidGelu, GELU, PlainSigmoidGelu, nn.GELU]
    assert list(model.state_dict()) == before


def test_uncompiled_it_equals_diffusers_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([GELU(16, 64, approximate="tanh"), nn.GELU(approximate="tanh")]), torch.randn(8, 16)
    wanted = [one(x) for one in model]
    use_sigmoid(model)
    assert all(torch.equal(one(x), before) for one, before in zip(model, wanted, strict=True))


def test_when_the_sigmoid_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.dtype] = []

    def counted(x: Tensor) -> Tensor:
        taken.append(x.dtype)
        return x

    monkeypatch.setattr(gelu, "gelu_by_sigmoid", counted)
    module = nn.ModuleList([GELU(2, 2, approximate="tanh"), nn.GELU(approximate="tanh")])
    use_sigmoid(module)
    for is_worth_it in (False, True):
        monkeypatch.setattr(kernels, "use_kernels", lambda x, is_worth_it=is_worth_it: is_worth_it)
        for dtype in (torch.float32, *kernels.HALF_DTYPES):
            module[0].gelu(torch.ones(2, dtype=dtype))
            module[1](torch.ones(2, dtype=dtype))
    assert taken == [dtype for dtype in kernels.HALF_DTYPES for _ in module]


def test_it_falls_then_rises() -> None:
    falling, rising = (gelu_by_sigmoid(torch.linspace(*ends, 500)).tolist() for ends in ((-4, -0.8), (-0.7, 8)))
    assert all(one > two for one, two in pairwise(falling))
    assert all(one < two for one, two in pairwise(rising))


@pytest.mark.parametrize("x", [-1e18, -2e13, -100.0, 100.0, 2e13, 1e18])
def test_limits_for_large_x(x: float) -> None:
    found = with_gradient(gelu_by_sigmoid, torch.tensor([x]).bfloat16(), torch.ones(1))
    wanted = with_gradient(by_tanh, torch.tensor([x]).bfloat16(), torch.ones(1))
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
