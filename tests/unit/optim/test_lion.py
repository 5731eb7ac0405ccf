from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.optim.lion import Lion


def made(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in ((4, 3), (5,), (2, 2, 2))]


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 0.1]), st.integers(0, 100))
def test_follows_the_paper(beta1: float, beta2: float, decay: float, seed: int) -> None:
    parameters = made()
    values = [parameter.detach().double() for parameter in parameters]
    momenta = [torch.zeros_like(value) for value in values]
    optimizer = Lion(parameters, lr=1e-2, betas=(beta1, beta2), weight_decay=decay)
    draw = torch.Generator().manual_seed(seed)
    # Rounding decides the sign of an interpolation near 0, so those elements are not compared.
    clear = [torch.ones_like(value, dtype=torch.bool) for value in values]
    for _ in range(4):
        for at, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            gradient = parameter.grad.double()
            values[at] = values[at] * (1 - 1e-2 * decay)
            blend = beta1 * momenta[at] + (1 - beta1) * gradient
            clear[at] &= (blend == 0) | (blend.abs() > 1e-5)
            values[at] = values[at] - 1e-2 * torch.sign(blend)
            momenta[at] = beta2 * momenta[at] + (1 - beta2) * gradient
        optimizer.step()
    assert sum(int(one.sum()) for one in clear) > 0 or beta1 > 1 - 1e-4
    for parameter, value, compared in zip(parameters, values, clear, strict=True):
        torch.testing.assert_close(parameter.detach().double()[compared], value[compared], rtol=1e-5, atol=1e-5)


def test_parameters_without_a_gradient_stay() -> None:
    parameters = made()
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[1].grad = torch.ones(5)
    optimizer = Lion(parameters, lr=1e-2, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(parameters[0], before[0])
    assert not torch.equal(parameters[1], before[1])
    assert parameters[0] not in optimizer.state


def test_bf16_parameters_have_a_float32_momentum() -> None:
    parameters = made(torch.bfloat16)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Lion(parameters, lr=0.125)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    for parameter, value in zip(parameters, before, strict=True):
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(parameter.detach(), value - 0.125, rtol=1e-2, atol=1e-2)


def test_decoupled_decay_does_not_scale_with_the_rate() -> None:
    weights = []
    for lr in (1e-3, 1e-2):
        parameter = torch.ones(1, requires_grad=True)
        optimizer = Lion([parameter], lr=lr, weight_decay=0.1, decoupled_weight_decay=True)
        parameter.grad = torch.zeros(1)
        optimizer.step()
        weights.append(float(parameter.detach()))
    assert weights == pytest.approx([0.9, 0.9])


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (0.9, 1.5)}, {"lr": 0.0, "decoupled_weight_decay": True}])
def test_invalid_options_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"lr|rate"):
        Lion(made(), **options)  # type: ignore[arg-type]
