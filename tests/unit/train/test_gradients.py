from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gracetune.train.gradients import FlatGradients, GradientClipping, LossScale, NoScale


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def losses(network: nn.Module, samples: torch.Tensor) -> Any:
    return network(samples).square().mean(1)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), small=st.sampled_from([0, 10, 1 << 20]))
def test_every_sample_of_a_step_has_equal_weight_in_any_micro_batch(sizes: list[int], small: int) -> None:
    """A step of any micro-batches has the gradient of the mean over all its samples. None, some or all of the
    parameters are small."""
    samples = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(1))
    ours, reference = model(), model()
    gradients = FlatGradients(dict(ours.named_parameters()), small=small)
    gradients.open()
    for part in samples.split(sizes):
        losses(ours, part).sum().backward()
        gradients.collect()
    norm = gradients.finish(1 / len(samples), GradientClipping(limit=None))
    losses(reference, samples).mean().backward()
    expected = [parameter.grad for parameter in reference.parameters()]
    for parameter, wanted in zip(ours.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([one for one in expected if one is not None]))


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_is_torchs(kind: Any) -> None:
    ours, reference = model(), model()
    samples = 10 * torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    gradients = FlatGradients(dict(ours.named_parameters()))
    gradients.open()
    losses(ours, samples).sum().backward()
    gradients.finish(1.0, GradientClipping(kind, 0.05))
    losses(reference, samples).sum().backward()
    if kind == "norm":
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    else:
        nn.utils.clip_grad_value_(reference.parameters(), 0.05)
    for one, two in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("factor", [1.0, torch.tensor(2.0**-16)], ids=["number", "scale"])
@pytest.mark.parametrize(
    "clip",
    [GradientClipping(), GradientClipping("value", 0.05), GradientClipping(limit=None)],
    ids=["norm", "value", "none"],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e25], ids=str)
def test_non_finite_gradients_become_0_and_the_norm_shows_them(
    bad: float, clip: GradientClipping, factor: float | torch.Tensor
) -> None:
    """One non-finite gradient among finite ones. In the last case only the norm is not finite."""
    network = model()
    gradients = FlatGradients(dict(network.named_parameters()))
    gradients.open()
    losses(network, torch.ones(1, 5)).sum().backward()
    spoilt = next(network.parameters()).grad
    assert spoilt is not None
    spoilt[0, 0] = bad
    norm = gradients.finish(factor, clip)
    assert not bool(norm.isfinite())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in network.parameters())
    gradients.close()
    assert all(parameter.grad is None for parameter in network.parameters())


def _twice(flat: torch.Tensor) -> None:
    """Acts as a second rank with the same gradients."""
    flat.mul_(2)


def test_ranks_are_summed() -> None:
    network = model()
    gradients = FlatGradients(dict(network.named_parameters()), reduce=_twice)
    gradients.open()
    losses(network, torch.ones(1, 5)).sum().backward()
    before = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    gradients.finish(0.5, GradientClipping(limit=None))
    for parameter, one in zip(network.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, one)


def test_the_loss_scale_follows_torchs_own() -> None:
    ours = LossScale(torch.device("cpu"), first=8.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    for norm in (1.0, float("inf"), 1.0, float("nan")):
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        theirs.scale(parameter.sum() * (1.0 if norm == 1.0 else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(norm))
        assert float(ours.scaled(torch.tensor(1.0))) == theirs.get_scale()
    saved = ours.save()
    other = LossScale(torch.device("cpu"))
    other.load(saved.json, saved.tensors)
    assert float(other.factor) == float(ours.factor)
    assert float(NoScale().scaled(torch.tensor(3.0))) == 3.0
