"""The attention of FLUX.2's single-stream blocks, with a contiguous gradient for cuDNN.

As in FLUX.1, their attention output is concatenated with the feed-forward's, so its gradient would have strided rows
(`models.common.attention.contiguous_gradient`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import Flux2ParallelSelfAttention, Flux2ParallelSelfAttnProcessor
from torch import Tensor, nn

from gracetune.models.common.attention import contiguous_gradient


def use_contiguous_gradients(denoiser: nn.Module) -> None:
    """Replace the attention processors of the single-stream blocks."""
    for module in denoiser.modules():
        if isinstance(module, Flux2ParallelSelfAttention):
            module.set_processor(cast(Any, ContiguousGradientProcessor)())


class ContiguousGradientProcessor(Flux2ParallelSelfAttnProcessor):
    """diffusers' processor with a contiguous gradient of the attention output."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        """The arguments keep diffusers' names, because diffusers inspects the signature. Caption tokens come first.

        `image_rotary_emb`: cosine and sine [tokens, channels]."""
        rotate: Any = apply_rotary_emb
        qkv, feed_forward = attn.to_qkv_mlp_proj(hidden_states).tensor_split([3 * attn.inner_dim], dim=-1)
        query, key, value = (one.unflatten(-1, (-1, attn.head_dim)) for one in qkv.chunk(3, dim=-1))
        query, key = attn.norm_q(query), attn.norm_k(key)
        attended = dispatch_attention_fn(
            rotate(query, image_rotary_emb, sequence_dim=1), rotate(key, image_rotary_emb, sequence_dim=1), value,
            attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config,
        )  # fmt: skip
        attended = contiguous_gradient(attended.flatten(2, 3).to(query.dtype))
        result: Tensor = attn.to_out(torch.cat([attended, attn.mlp_act_fn(feed_forward)], dim=-1))
        return result
