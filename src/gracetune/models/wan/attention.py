"""Wan's attention by other steps than diffusers': the same numbers in fewer passes over memory.

diffusers writes the two halves of each turned pair into an empty tensor, one after the other; compiled, that reads and
writes everything twice, and its backward pass three times. Here a pair is turned in one expression, and on a GPU in one
kernel together with the norm before it.
"""

from __future__ import annotations

from typing import Any, cast

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from gracetune import kernels
from gracetune.models.common.pairs import turned
from gracetune.models.common.sharing import answers


def turn_by_pairs(denoiser: nn.Module) -> None:
    for module in denoiser.modules():
        if isinstance(module, WanAttention):
            module.set_processor(cast(Any, PairwiseAttention)())


class PairwiseAttention(WanAttnProcessor):
    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Under diffusers' own names for the arguments: it looks at them."""
        if attn.fused_projections or attn.add_k_proj is not None:  # nobody trains the first; a picture's keys are few
            given = (attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            libraries: Tensor = super().__call__(*given)
            return libraries
        if encoder_hidden_states is None:
            query, key, value = answers(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        else:
            query = attn.to_q(hidden_states)
            key, value = answers(encoder_hidden_states, (attn.to_k, attn.to_v))
        query = _normed_turned(query, attn.norm_q, attn.heads, rotary_emb)
        key = _normed_turned(key, attn.norm_k, attn.heads, rotary_emb)
        answer = dispatch_attention_fn(
            query, key, value.unflatten(2, (attn.heads, -1)), attn_mask=attention_mask, backend=self._attention_backend,
            parallel_config=self._parallel_config if encoder_hidden_states is None else None,
        )  # fmt: skip
        result: Tensor = attn.to_out[1](attn.to_out[0](answer.flatten(2, 3).type_as(query)))
        return result


def _normed_turned(x: Tensor, norm: nn.RMSNorm, heads: int, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """By heads; between image and text nothing is turned."""
    if kernels.pay(x) and not norm.weight.requires_grad:
        from gracetune.kernels.fused_rope import normed_turned  # only a GPU has triton

        assert norm.eps is not None, "Wan's norms have one"
        by_heads = normed_turned(x, norm.weight, norm.eps, *(angles or (None, None))).unflatten(2, (heads, -1))
    else:
        by_heads = norm(x).unflatten(2, (heads, -1))
        if angles is not None:
            cos, sin = angles  # each angle is there twice
            by_heads = turned(by_heads, cos[..., 0::2], sin[..., 1::2])
    return cast(Tensor, by_heads)
