"""Qwen-Image's attention by other steps than diffusers': the same numbers in fewer passes over memory.

diffusers turns pairs as complex numbers. torch's compiler has none: it writes queries and keys in fp32, calls torch's
own product, and reads that again. Here a pair is turned in one expression of real ones.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenEmbedRope,
    QwenImageTransformer2DModel,
)
from torch import Tensor, nn

from gracetune.models.common.pairs import turned
from gracetune.models.common.sharing import answers


def turn_by_pairs(denoiser: nn.Module) -> None:
    assert isinstance(denoiser, QwenImageTransformer2DModel)
    if type(denoiser.pos_embed) is not QwenEmbedRope:  # layered pictures have their own
        return
    denoiser.pos_embed.__class__ = RealAngles  # the same tables under the same names
    for block in cast(Any, denoiser.transformer_blocks):
        block.attn.set_processor(cast(Any, PairwiseAttention)())


class RealAngles(QwenEmbedRope):
    """Cosine and sine [tokens, pairs, 2] instead of complex numbers [tokens, pairs]: of the picture, of the caption.

    Made anew every time: a recorded step would read on in a table that diffusers forgets when it has met many shapes.
    """

    _compute_video_freqs = cast(Any, QwenEmbedRope._compute_video_freqs).__wrapped__

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        picture, caption = super().forward(*args, **kwargs)
        return torch.view_as_real(picture), torch.view_as_real(caption)


class PairwiseAttention(QwenDoubleStreamAttnProcessor2_0):
    def __call__(  # type: ignore[override]  # theirs says one tensor, and returns two
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None, attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Under diffusers' own names for the arguments: it looks at them. The caption's tokens come first."""
        assert attention_mask is None, "the model's blocks give the caption's"
        assert image_rotary_emb is not None, "the model's blocks give it"
        of_picture, of_caption = image_rotary_emb
        query, key, value = answers(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        own_query, own_key, own_value = answers(
            encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        query = _normed_turned(query, attn.norm_q, attn, of_picture)
        key = _normed_turned(key, attn.norm_k, attn, of_picture)
        own_query = _normed_turned(own_query, attn.norm_added_q, attn, of_caption)
        own_key = _normed_turned(own_key, attn.norm_added_k, attn, of_caption)
        answer = dispatch_attention_fn(
            torch.cat([own_query, query], dim=1), torch.cat([own_key, key], dim=1),
            torch.cat([_by_heads(own_value, attn), _by_heads(value, attn)], dim=1),
            attn_mask=_joint_mask(encoder_hidden_states_mask, hidden_states), backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )  # fmt: skip
        answer = answer.flatten(2, 3).type_as(query)
        caption = encoder_hidden_states.shape[1]
        result: Tensor = attn.to_out[1](attn.to_out[0](answer[:, caption:].contiguous()))
        own_result: Tensor = attn.to_add_out(answer[:, :caption].contiguous())
        return result, own_result


def _by_heads(x: Tensor, attn: Any) -> Tensor:
    return x.unflatten(-1, (-1, attn.inner_dim // attn.heads))  # type: ignore[no-any-return]


def _normed_turned(x: Tensor, norm: nn.Module, attn: Any, angles: Tensor) -> Tensor:
    """`angles` [tokens, pairs, 2], or for each sample its own"""
    cos, sin = angles.unsqueeze(-3).unbind(-1)
    return turned(norm(_by_heads(x, attn)), cos, sin)


def _joint_mask(caption: Tensor | None, picture: Tensor) -> Tensor | None:
    """For captions of unlike length; of the picture everything is seen."""
    if caption is None:
        return None
    seen = torch.ones(picture.shape[:2], dtype=torch.bool, device=picture.device)
    return torch.cat([caption, seen], dim=1)[:, None, None, :]
