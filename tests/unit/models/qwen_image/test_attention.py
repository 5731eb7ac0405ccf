"""Qwen-Image's attention with real numbers, compared with diffusers' complex one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import nn

from gracetune.models.qwen_image.attention import QwenPairwiseAttention, RealAngles, use_pairwise_attention


def tiny(**others: Any) -> Any:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, axes_dims_rope=(4, 6, 6), **others,
    )  # fmt: skip


def answered(model: Any, masked: bool, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    model.zero_grad()
    images = [(1, 4, 6), (1, 2, 2)]
    tokens = sum(height * width for _, height, width in images)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) if masked else None
    answer = model(
        hidden_states=torch.randn(2, tokens, 16, dtype=dtype), encoder_hidden_states=torch.randn(2, 5, 12, dtype=dtype),
        encoder_hidden_states_mask=mask, timestep=torch.tensor([0.2, 0.7]), img_shapes=[images] * 2,
        return_dict=False,
    )[0]  # fmt: skip
    answer.float().square().sum().backward()
    return answer.detach(), [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_it_equals_diffusers(masked: bool, dtype: torch.dtype, near: float, zero_cond_t: bool) -> None:
    theirs = tiny(zero_cond_t=zero_cond_t).to(dtype)
    ours = deepcopy(theirs)
    use_pairwise_attention(ours)
    assert isinstance(ours.transformer_blocks[1].attn.processor, QwenPairwiseAttention)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    answer, gradients = answered(ours, masked, dtype)
    wanted, wanted_gradients = answered(theirs, masked, dtype)
    assert len(gradients) == len(wanted_gradients)
    for one, two in zip([answer, *gradients], [wanted, *wanted_gradients], strict=True):
        assert (one - two).float().norm() <= near * two.float().norm() + 1e-6


def test_nothing_complex_reaches_a_block() -> None:
    model, seen = tiny(), list[Any]()
    use_pairwise_attention(model)
    assert isinstance(model.pos_embed, RealAngles)
    model.transformer_blocks[0].register_forward_pre_hook(
        lambda block, given, named: seen.extend(named["image_rotary_emb"]), with_kwargs=True
    )
    answered(model, False, torch.float32)
    assert [one.dtype for one in seen] == [torch.float32] * 2


def test_layered_models_are_unchanged() -> None:
    model = tiny(use_layer3d_rope=True)
    before = {name: type(one) for name, one in model.named_modules()}
    use_pairwise_attention(model)
    assert {name: type(one) for name, one in model.named_modules()} == before
    assert not any(isinstance(one.attn.processor, QwenPairwiseAttention) for one in model.transformer_blocks)


def test_another_model_is_rejected() -> None:
    with pytest.raises(AssertionError):
        use_pairwise_attention(nn.Linear(1, 1))
