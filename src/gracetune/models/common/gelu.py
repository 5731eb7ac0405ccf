"""GELU by a sigmoid where a compiled graph computes it on a GPU.

(1 + tanh(u)) / 2 is sigmoid(2 u): one exponential and one division. The tanh that torch's compiler takes has branches,
and neighbouring values go different ways: on an H200 that takes longer than reading and writing the values.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from gracetune import kernels

LINEAR: Final = 1.5957691216057308
"""2 sqrt(2 / pi), and what GELU's approximation by tanh multiplies it by for x^3:"""
CUBIC: Final = 0.044715 * LINEAR


def use_sigmoid(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is GELU and module.approximate == "tanh":
            module.__class__ = SigmoidGelu  # the same weights under the same names
        elif type(module) is nn.GELU and module.approximate == "tanh":
            module.__class__ = PlainSigmoidGelu


class SigmoidGelu(GELU):
    def gelu(self, gate: Tensor) -> Tensor:
        """Under diffusers' own name for the argument."""
        if not kernels.pays_in_halves(gate):
            theirs: Tensor = super().gelu(gate)
            return theirs
        return gelu_by_sigmoid(gate)


class PlainSigmoidGelu(nn.GELU):
    """Without a layer before it."""

    def forward(self, input: Tensor) -> Tensor:
        """Under torch's own name for the argument."""
        if not kernels.pays_in_halves(input):
            return super().forward(input)
        return gelu_by_sigmoid(input)


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """In fp32 and rounded once, as torch's own."""
    result: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Gelu(torch.autograd.Function):
    """Keeps x. With s = sigmoid(v), v = LINEAR x + CUBIC x^3: y = x s, y' = s + x s (1 - s) v'."""

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
        slope = s + (s * (1 - s) * wide) * (LINEAR + (3 * CUBIC) * squared)  # far out it is 0 times a number, not inf
        return (gradient.float() * slope).to(x.dtype)
