"""Wan's block with fewer passes over memory on a GPU: each residual is fused with the norm after it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from gracetune import kernels


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
    """x + a gate. No norm follows, so torch's compiler makes one pass of each direction on its own.

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
    """x + a gate, for x and a [batch, tokens, width] and gate [batch, width]. Only x and a get gradients."""
    result: Tensor = _Gated.apply(x, a.to(x.dtype), gate)  # type: ignore[no-untyped-call]
    return result
