"""Qwen-Image's attention with fewer passes over memory than diffusers', and the same results.

diffusers rotates pairs as complex numbers, which torch's compiler does not support: it writes queries and keys in fp32,
calls torch's own multiplication and reads the result again. Here each pair is rotated in one expression of real
numbers.
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

from gracetune.models.common.attention import apply_layers, apply_rope


def use_pairwise_attention(denoiser: nn.Module) -> None:
    """Replace the RoPE tables and attention processors of a Qwen-Image denoiser."""
    assert isinstance(denoiser, QwenImageTransformer2DModel)
    if type(denoiser.pos_embed) is not QwenEmbedRope:  # models for layered images have other positions
        return
    denoiser.pos_embed.__class__ = RealAngles  # keeps its tables and their names
    for block in cast(Any, denoiser.transformer_blocks):
        block.attn.set_processor(cast(Any, QwenPairwiseAttention)())


class RealAngles(QwenEmbedRope):
    """Cosine and sine [tokens, pairs, 2], for image and caption, instead of complex numbers [tokens, pairs].

    Computed at every call, without diffusers' LRU cache: a captured CUDA graph would keep reading a table after the
    cache evicted it.
    """

    _compute_video_freqs = cast(Any, QwenEmbedRope._compute_video_freqs).__wrapped__

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        image, caption = super().forward(*args, **kwargs)
        return torch.view_as_real(image), torch.view_as_real(caption)


class QwenPairwiseAttention(QwenDoubleStreamAttnProcessor2_0):
    """diffusers' processor with real-valued RoPE."""

    def __call__(  # type: ignore[override]  # diffusers annotates one tensor, but returns two
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None, attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The arguments keep diffusers' names, because diffusers inspects the signature. Caption tokens come first."""
        assert attention_mask is None, "the model's blocks pass encoder_hidden_states_mask"
        assert image_rotary_emb is not None, "the model's blocks pass image_rotary_emb"
        image_angles, caption_angles = image_rotary_emb
        query, key, value = apply_layers(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        caption_query, caption_key, caption_value = apply_layers(
            encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        query = _norm_and_rope(query, attn.norm_q, attn, image_angles)
        key = _norm_and_rope(key, attn.norm_k, attn, image_angles)
        caption_query = _norm_and_rope(caption_query, attn.norm_added_q, attn, caption_angles)
        caption_key = _norm_and_rope(caption_key, attn.norm_added_k, attn, caption_angles)
        attended = dispatch_attention_fn(
            torch.cat([caption_query, query], dim=1), torch.cat([caption_key, key], dim=1),
            torch.cat([_by_heads(caption_value, attn), _by_heads(value, attn)], dim=1),
            attn_mask=_joint_mask(encoder_hidden_states_mask, hidden_states), backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )  # fmt: skip
        attended = attended.flatten(2, 3).type_as(query)
        caption = encoder_hidden_states.shape[1]
        result: Tensor = attn.to_out[1](attn.to_out[0](attended[:, caption:].contiguous()))
        caption_result: Tensor = attn.to_add_out(attended[:, :caption].contiguous())
        return result, caption_result


def _by_heads(x: Tensor, attn: Any) -> Tensor:
    """[B, tokens, width] -> [B, tokens, heads, head size]."""
    return x.unflatten(-1, (-1, attn.inner_dim // attn.heads))  # type: ignore[no-any-return]


def _norm_and_rope(x: Tensor, norm: nn.Module, attn: Any, angles: Tensor) -> Tensor:
    """`x` by heads, normalized and rotated by `angles` [tokens, pairs, 2] or [B, tokens, pairs, 2]."""
    cos, sin = angles.unsqueeze(-3).unbind(-1)
    return apply_rope(norm(_by_heads(x, attn)), cos, sin)


def _joint_mask(caption: Tensor | None, image: Tensor) -> Tensor | None:
    """For captions of different lengths in a batch. All image tokens are visible."""
    if caption is None:
        return None
    visible = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
    return torch.cat([caption, visible], dim=1)[:, None, None, :]
