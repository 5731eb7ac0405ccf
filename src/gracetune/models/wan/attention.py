"""Wan's attention with fewer passes over memory than diffusers', and the same results.

For RoPE, diffusers writes the two halves of each rotated pair into an empty tensor, one after the other. Compiled, that
reads and writes everything twice, and three times in the backward pass. Here each pair is rotated in one expression. On
a GPU, a fused kernel computes it together with the norm before it.
"""

from __future__ import annotations

from typing import Any, cast

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from gracetune import kernels
from gracetune.models.common.attention import answers, apply_rope


def turn_by_pairs(denoiser: nn.Module) -> None:
    """Replace the attention processors of a Wan denoiser."""
    for module in denoiser.modules():
        if isinstance(module, WanAttention):
            module.set_processor(cast(Any, WanPairwiseAttention)())


class WanPairwiseAttention(WanAttnProcessor):
    """diffusers' processor with RoPE in one expression, fused with the norm on a GPU."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The arguments keep diffusers' names, because diffusers inspects the signature."""
        # Fused projections are for inference. Image-to-video cross-attention (2.1) has few image keys: no gain.
        if attn.fused_projections or attn.add_k_proj is not None:
            given = (attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            result: Tensor = super().__call__(*given)
            return result
        if encoder_hidden_states is None:
            query, key, value = answers(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        else:
            query = attn.to_q(hidden_states)
            key, value = answers(encoder_hidden_states, (attn.to_k, attn.to_v))
        query = _norm_and_rope(query, attn.norm_q, attn.heads, rotary_emb)
        key = _norm_and_rope(key, attn.norm_k, attn.heads, rotary_emb)
        answer = dispatch_attention_fn(
            query, key, value.unflatten(2, (attn.heads, -1)), attn_mask=attention_mask, backend=self._attention_backend,
            parallel_config=self._parallel_config if encoder_hidden_states is None else None,
        )  # fmt: skip
        output: Tensor = attn.to_out[1](attn.to_out[0](answer.flatten(2, 3).type_as(query)))
        return output


def _norm_and_rope(x: Tensor, norm: nn.RMSNorm, heads: int, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """[B, tokens, width] -> [B, tokens, heads, head size], normalized and rotated. Cross-attention has no RoPE."""
    if kernels.pay(x) and not norm.weight.requires_grad:
        from gracetune.kernels.fused_rope import norm_rope  # triton is only installed with CUDA builds of torch

        assert norm.eps is not None, "Wan's norms set eps"
        by_heads = norm_rope(x, norm.weight, norm.eps, *(angles or (None, None))).unflatten(2, (heads, -1))
    else:
        by_heads = norm(x).unflatten(2, (heads, -1))
        if angles is not None:
            cos, sin = angles  # each angle is stored twice, once per channel of its pair
            by_heads = apply_rope(by_heads, cos[..., 0::2], sin[..., 1::2])
    return cast(Tensor, by_heads)
