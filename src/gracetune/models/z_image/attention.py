"""Z-Image's attention with real numbers, and the same results.

diffusers rotates pairs as complex numbers, which torch's compiler does not support. Here each pair is rotated in one
expression of real numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_z_image import (
    RopeEmbedder,
    ZImageTransformer2DModel,
    ZImageTransformerBlock,
    ZSingleStreamAttnProcessor,
)
from torch import Tensor, nn

from gracetune.models.common.attention import apply_layers, apply_rope


def use_pairwise_attention(denoiser: nn.Module) -> None:
    """Replace the RoPE tables and attention processors of a Z-Image denoiser."""
    assert isinstance(denoiser, ZImageTransformer2DModel)
    theirs = denoiser.rope_embedder
    real: Any = ZImageAngles
    denoiser.rope_embedder = real(theirs.theta, theirs.axes_dims, theirs.axes_lens)
    for module in denoiser.modules():
        if isinstance(module, ZImageTransformerBlock):
            cast(Any, module.attention).set_processor(cast(Any, ZImagePairwiseAttention)())


class ZImageAngles(RopeEmbedder):
    """Cosine and sine [tokens, pairs, 2] instead of complex numbers [tokens, pairs]."""

    @staticmethod
    def precompute_freqs_cis(dim: list[int], end: list[int], theta: float = 256.0) -> list[Tensor]:
        compute: Any = RopeEmbedder.precompute_freqs_cis
        return [torch.view_as_real(table) for table in compute(dim, end, theta)]

    def __call__(self, ids: Tensor) -> Tensor:
        """`ids` [tokens, axes]. diffusers joins the axes along the last dimension, which is cosine and sine here."""
        tables: list[Tensor] | None = self.freqs_cis
        if tables is None or tables[0].device != ids.device:
            made = self.precompute_freqs_cis(self.axes_dims, self.axes_lens, theta=self.theta)
            tables = [table.to(ids.device) for table in made]
            kept: Any = self
            kept.freqs_cis = tables
        return torch.cat([table[ids[:, axis]] for axis, table in enumerate(tables)], dim=1)


class ZImagePairwiseAttention(ZSingleStreamAttnProcessor):
    """diffusers' processor with real-valued RoPE."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, freqs_cis: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The arguments keep diffusers' names, because diffusers inspects the signature.

        `attention_mask` [B, tokens]: which tokens are visible. `freqs_cis` [B, tokens, pairs, 2]: cosine and sine.
        """
        assert freqs_cis is not None, "the model's blocks pass freqs_cis"
        query, key, value = (
            one.unflatten(-1, (attn.heads, -1))
            for one in apply_layers(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        )
        cos, sin = freqs_cis.unsqueeze(2).unbind(-1)
        attended = dispatch_attention_fn(
            apply_rope(attn.norm_q(query), cos, sin), apply_rope(attn.norm_k(key), cos, sin), value,
            attn_mask=None if attention_mask is None else attention_mask[:, None, None, :],
            backend=self._attention_backend, parallel_config=self._parallel_config,
        )  # fmt: skip
        result: Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).to(query.dtype)))
        return result
