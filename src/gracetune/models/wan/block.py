"""Wan's block by fewer passes over memory on a GPU: each residual together with the norm after it, in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from gracetune import kernels


def use_fused_blocks(denoiser: nn.Module) -> None:
    for module in denoiser.modules():
        if type(module) is WanTransformerBlock:
            module.__class__ = FusedBlock  # the same weights under the same names


class FusedBlock(WanTransformerBlock):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Tensor:
        """Under diffusers' own names for the arguments: it may give them by name."""
        if not self._fits(hidden_states, temb):
            unfused: Tensor = super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
            return unfused
        from gracetune.kernels.fused_norm import added_and_normed, normed  # only a GPU has triton

        # By parts first, so that each of them is contiguous: [6, batch, width].
        shift, scale, gate, c_shift, c_scale, c_gate = (
            (self.scale_shift_table + temb.float()).transpose(0, 1).contiguous().unbind(0)
        )
        norm2: Any = self.norm2  # a layer norm: otherwise they would not fit
        h, n = normed(hidden_states, 1 + scale, shift, self.norm1.eps)
        attended = self.attn1(n, None, None, rotary_emb)
        weight, bias = norm2.weight.float()[None], norm2.bias.float()[None]
        h, n = added_and_normed(h, attended, gate, weight, bias, norm2.eps)
        attended = self.attn2(n, encoder_hidden_states, None, None)
        h, n = added_and_normed(h, attended, None, 1 + c_scale, c_shift, self.norm3.eps)
        return gated(h, self.ffn(n), c_gate)

    def _fits(self, hidden_states: Tensor, temb: Tensor) -> bool:
        """Whether the kernels can do it: they give no gradients to the modulation and the norms' weights."""
        if not kernels.pays_in_halves(hidden_states):
            return False
        if temb.ndim != 3 or type(self.norm2) is not FP32LayerNorm:
            return False
        fixed = (temb, self.scale_shift_table, self.norm2.weight, self.norm2.bias)
        return not any(tensor.requires_grad for tensor in fixed)


FusedBlock.__name__ = WanTransformerBlock.__name__  # by it adapters' targets and the repeated blocks are named


class _Gated(torch.autograd.Function):
    """No norm follows it, and torch's compiler makes one pass of each way by itself.

    Left to autograd, x would get its gradient by way of fp32: a second tensor with the same numbers.
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
    """x + a gate, for [batch, tokens, width] and [batch, width]. Only x and a get gradients."""
    result: Tensor = _Gated.apply(x, a.to(x.dtype), gate)  # type: ignore[no-untyped-call]
    return result
