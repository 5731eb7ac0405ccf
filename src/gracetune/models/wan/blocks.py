"""Wan's blocks and their attention with fewer passes over memory than diffusers', and the same results.

On a GPU, a block fuses each residual with the norm after it.

For RoPE, diffusers writes the two halves of each rotated pair into an empty tensor, one after the other. Compiled, that
reads and writes everything twice, and three times in the backward pass. Here each pair is rotated in one expression. On
a GPU, a fused kernel computes it together with the norm before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformerBlock
from torch import Tensor, nn

from gracetune import kernels
from gracetune.models.common.attention import apply_layers, apply_rope


def use_fused_blocks(denoiser: nn.Module) -> None:
    """Switch the denoiser's blocks to the fused implementation."""
    for module in denoiser.modules():
        if type(module) is WanTransformerBlock:
            module.__class__ = FusedBlock  # keeps its weights and their names


class FusedBlock(WanTransformerBlock):
    """diffusers' block with fused residuals and norms, if the kernels apply."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Tensor:
        """The arguments keep diffusers' names, because callers may use them."""
        if not self._can_fuse(hidden_states, temb):
            unfused: Tensor = super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
            return unfused
        from gracetune.kernels.fused_norm import add_norm, modulated_norm  # triton needs a CUDA build of torch

        # Transposed to [6, batch, width] first, so that each of the six parts is contiguous.
        shift, scale, gate, c_shift, c_scale, c_gate = (
            (self.scale_shift_table + temb.float()).transpose(0, 1).contiguous().unbind(0)
        )
        norm2: Any = self.norm2  # a layer norm, as `_can_fuse` checked
        h, n = modulated_norm(hidden_states, 1 + scale, shift, self.norm1.eps)
        attended = self.attn1(n, None, None, rotary_emb)
        weight, bias = norm2.weight.float()[None], norm2.bias.float()[None]
        h, n = add_norm(h, attended, gate, weight, bias, norm2.eps)
        attended = self.attn2(n, encoder_hidden_states, None, None)
        h, n = add_norm(h, attended, None, 1 + c_scale, c_shift, self.norm3.eps)
        return gated(h, self.ffn(n), c_gate)

    def _can_fuse(self, hidden_states: Tensor, temb: Tensor) -> bool:
        """Whether the kernels apply. They give no gradients to the modulation and the norms' weights."""
        if not kernels.use_half_kernels(hidden_states):
            return False
        if temb.ndim != 3 or type(self.norm2) is not FP32LayerNorm:
            return False
        fixed = (temb, self.scale_shift_table, self.norm2.weight, self.norm2.bias)
        return not any(tensor.requires_grad for tensor in fixed)


FusedBlock.__name__ = WanTransformerBlock.__name__  # adapter targets and repeated blocks are found by class name


class _Gated(torch.autograd.Function):
    """x + a * gate. No norm follows, so torch's compiler fuses the forward and the backward pass without a kernel of
    ours.

    Plain autograd would compute the gradient of x through fp32 and save a second tensor with the same values.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(gate)
        return (x.float() + a.float() * gate[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (gate,) = ctx.saved_tensors
        return gradient, (gradient.float() * gate[:, None]).to(gradient.dtype), None


def gated(x: Tensor, a: Tensor, gate: Tensor) -> Tensor:
    """x + a * gate, for x and a [batch, tokens, width] and gate [batch, width]. Only x and a get gradients."""
    result: Tensor = _Gated.apply(x, a.to(x.dtype), gate)  # type: ignore[no-untyped-call]
    return result


def use_pairwise_attention(denoiser: nn.Module) -> None:
    """Switch the denoiser's attention to processors that rotate each pair in one expression."""
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
        # Fused projections are for inference. Wan 2.1's image-to-video cross-attention has too few image keys to gain
        # from it.
        if attn.fused_projections or attn.add_k_proj is not None:
            given = (attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            result: Tensor = super().__call__(*given)
            return result
        if encoder_hidden_states is None:
            query, key, value = apply_layers(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        else:
            query = attn.to_q(hidden_states)
            key, value = apply_layers(encoder_hidden_states, (attn.to_k, attn.to_v))
        query = _norm_and_rope(query, attn.norm_q, attn.heads, rotary_emb)
        key = _norm_and_rope(key, attn.norm_k, attn.heads, rotary_emb)
        attended = dispatch_attention_fn(
            query, key, value.unflatten(2, (attn.heads, -1)), attn_mask=attention_mask, backend=self._attention_backend,
            parallel_config=self._parallel_config if encoder_hidden_states is None else None,
        )  # fmt: skip
        output: Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).type_as(query)))
        return output


def _norm_and_rope(x: Tensor, norm: nn.RMSNorm, heads: int, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """[B, tokens, width] -> [B, tokens, heads, head size], normalized and rotated. Cross-attention has no RoPE."""
    if kernels.use_kernels(x) and not norm.weight.requires_grad:
        from gracetune.kernels.fused_rope import norm_rope  # triton is only installed with CUDA builds of torch

        assert norm.eps is not None, "Wan's norms set eps"
        by_heads = norm_rope(x, norm.weight, norm.eps, *(angles or (None, None))).unflatten(2, (heads, -1))
    else:
        by_heads = norm(x).unflatten(2, (heads, -1))
        if angles is not None:
            cos, sin = angles  # each angle is stored twice, once per channel of its pair
            by_heads = apply_rope(by_heads, cos[..., 0::2], sin[..., 1::2])
    return cast(Tensor, by_heads)
