"""FLUX's attention with positions per sample, and with a contiguous gradient for cuDNN.

diffusers rotates all samples of a batch by the same positions, but routed tokens (`models.token_routing`) differ per
sample.

In single-stream blocks the attention output is concatenated with the feed-forward's, so its gradient would have strided
rows (`models.common.attention.contiguous_gradient`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import Tensor, nn

from gracetune.models.common.attention import apply_rope, contiguous_gradient


def use_own_processors(denoiser: nn.Module) -> None:
    """Replace the attention processors of a FLUX denoiser."""
    for module in denoiser.modules():
        if isinstance(module, FluxAttention):
            module.set_processor(cast(Any, SingleStreamProcessor if module.pre_only else PerSamplePositions)())


class PerSamplePositions(FluxAttnProcessor):
    """diffusers' processor, extended by positions that differ between the samples of a batch."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        """The arguments keep diffusers' names, because diffusers inspects the signature. Caption tokens come first.

        `image_rotary_emb`: cosine and sine [tokens, channels], or [B, tokens, channels]."""
        if image_rotary_emb is None or image_rotary_emb[0].ndim == 2:
            original: Any = super().__call__
            return original(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        query, key, value = _by_heads(hidden_states, attn, "to_{}")
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            caption_query, caption_key, caption_value = _by_heads(encoder_hidden_states, attn, "add_{}_proj")
            query = torch.cat([attn.norm_added_q(caption_query), query], dim=1)
            key = torch.cat([attn.norm_added_k(caption_key), key], dim=1)
            value = torch.cat([caption_value, value], dim=1)
        cos, sin = (table[:, :, None, ::2] for table in image_rotary_emb)  # each angle is stored twice
        attended = dispatch_attention_fn(
            apply_rope(query, cos, sin), apply_rope(key, cos, sin), value, attn_mask=attention_mask,
            backend=self._attention_backend, parallel_config=self._parallel_config,
        )  # fmt: skip
        attended = attended.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return attended
        caption = encoder_hidden_states.shape[1]
        result = attn.to_out[1](attn.to_out[0](attended[:, caption:].contiguous()))
        return result, attn.to_add_out(attended[:, :caption].contiguous())


def _by_heads(x: Tensor, attn: Any, names: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, tokens, heads, head size]."""
    query, key, value = (attn.get_submodule(names.format(part))(x) for part in "qkv")
    return tuple(one.unflatten(-1, (-1, attn.head_dim)) for one in (query, key, value))


class SingleStreamProcessor(PerSamplePositions):
    """The processor of single-stream blocks, with a contiguous gradient."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        """The arguments keep diffusers' names, because diffusers inspects the signature."""
        return contiguous_gradient(
            super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        )
