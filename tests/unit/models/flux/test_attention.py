"""The gradient of attention in FLUX's single-stream blocks is contiguous for its kernel."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from gracetune.models.flux.attention import use_own_processors


def tiny() -> Any:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def answered(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    answer = model(
        hidden_states=torch.randn(2, 6, 16), encoder_hidden_states=torch.randn(2, 3, 12),
        pooled_projections=torch.randn(2, 8), timestep=torch.tensor([0.2, 0.7]), txt_ids=torch.zeros(3, 3),
        img_ids=torch.rand(6, 3), return_dict=False,
    )[0]  # fmt: skip
    answer.square().sum().backward()
    return [answer.detach(), *(one.grad for one in model.parameters())]


def test_gradient_is_contiguous_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[bool] = []
    real = transformer_flux.dispatch_attention_fn

    def watched(*given: Any, **others: Any) -> torch.Tensor:
        answer: torch.Tensor = real(*given, **others)
        answer.register_hook(lambda gradient: whole.append(gradient.is_contiguous()))
        return answer

    monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", watched)
    theirs = tiny()
    ours = deepcopy(theirs)
    use_own_processors(ours)
    wanted = answered(theirs)
    assert whole == [False, False, True], "of two blocks with one stream, and one with two"
    whole.clear()
    found = answered(ours)
    assert whole == [True, True, True]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
