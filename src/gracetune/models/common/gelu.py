"""GELU computed with a sigmoid, for compiled graphs on GPUs.

(1 + tanh(u)) / 2 is sigmoid(2 u), which takes one exponential and one division. The tanh that torch's compiler emits
has branches that diverge within a warp: on an H200 it takes longer than reading and writing the values.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from gracetune import kernels

LINEAR: Final = 1.5957691216057308
"""2 sqrt(2 / pi), the coefficient of x. The tanh approximation multiplies it by 0.044715 for x^3:"""
CUBIC: Final = 0.044715 * LINEAR


def use_sigmoid(model: nn.Module) -> None:
    """Give the model's tanh-approximated GELUs the sigmoid form, in compiled graphs on GPUs and half precision only.

    Everywhere else (uncompiled, on a CPU, in fp32) they compute as before.
    """
    for module in model.modules():
        if type(module) is GELU and module.approximate == "tanh":
            module.__class__ = SigmoidGelu  # keeps its weights and their names
        elif type(module) is nn.GELU and module.approximate == "tanh":
            module.__class__ = PlainSigmoidGelu


class SigmoidGelu(GELU):
    """diffusers' GELU, which has a projection in front. `use_half_kernels` is true only while a graph is compiled."""

    def gelu(self, gate: Tensor) -> Tensor:
        """The argument keeps diffusers' name."""
        if not kernels.use_half_kernels(gate):
            result: Tensor = super().gelu(gate)
            return result
        return gelu_by_sigmoid(gate)


class PlainSigmoidGelu(nn.GELU):
    """For GELUs without a projection in front."""

    def forward(self, input: Tensor) -> Tensor:
        """The argument keeps torch's name."""
        if not kernels.use_half_kernels(input):
            return super().forward(input)
        return gelu_by_sigmoid(input)


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, computed in fp32 and rounded once, as torch does."""
    result: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Gelu(torch.autograd.Function):
    """Saves only x. With s = sigmoid(v), v = LINEAR x + CUBIC x^3: y = x s, y' = s + x s (1 - s) v'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * torch.sigmoid(wide * (LINEAR + CUBIC * (wide * wide)))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        wide = x.float()
        squared = wide * wide
        s = torch.sigmoid(wide * (LINEAR + CUBIC * squared))
        slope = s + (s * (1 - s) * wide) * (LINEAR + (3 * CUBIC) * squared)  # this order gives 0, not NaN, for large x
        return (gradient.float() * slope).to(x.dtype)
