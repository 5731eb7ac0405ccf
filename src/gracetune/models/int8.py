"""Frozen linear layers that store their weight in int8, with one scale per row. Activations are not quantized.

    W  = round(w / s), s = max |w| of the row / 127        [out, in] in int8, [out, 1] in fp32
    y  = x (W s)'         dx = dy (W s)

Both passes multiply with the same weight, which is dequantized to the compute dtype and freed again. This saves memory
but no time, on any device. A step saves nothing but the int8 weight.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.models.eight_bit_linear import EightBitLinear, compute_dtype

_MOST: Final = 127.0
_SMALLEST: Final = 2.0**-100
"""Rows whose largest absolute value is below this become zeros."""


class Int8Linear(EightBitLinear):
    """A frozen linear layer whose weight is stored in int8."""

    int8_values: Tensor
    """[out, in]"""
    int8_scales: Tensor
    """[out, 1]"""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        wide = weight.detach().float()
        scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(_SMALLEST) / _MOST
        # A row with a NaN or infinity gets a non-finite scale and becomes non-finite as a whole: the first loss shows
        # it.
        self.register_buffer("int8_values", (wide / scales).round().to(torch.int8))
        self.register_buffer("int8_scales", scales)

    def plain_weight(self) -> Tensor:
        return _plain(self.int8_values, self.int8_scales, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        result: Tensor = _Frozen.apply(x.to(dtype), self.int8_values, self.int8_scales, bias)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


def _plain(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (values * scales).to(dtype)


@torch.library.custom_op("gracetune::through_int8", mutates_args=())
def _through(gradient: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """The gradient of the input. A custom operator, because torch.compile would otherwise save the 16-bit weight of the
    forward pass for it, at twice the memory of int8."""
    return gradient @ _plain(values, scales, gradient.dtype)


@_through.register_fake
def _(gradient: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], values.shape[1])


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, scales)
        return F.linear(x, _plain(values, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        values, scales = ctx.saved_tensors
        return _through(gradient, values, scales), None, None, None
