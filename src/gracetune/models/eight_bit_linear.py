"""Frozen linear layers that store their weight in 8 bits: fp8 multiplies in 8 bits, int8 only saves memory.

fp8: both products of a training step, forward and the gradient of the input, run in 8 bits. A weight is rounded to e4m3
once, with one scale per row (output feature). The other operand (activations in the forward pass, gradients in the
backward pass) is rounded on the fly with one scale per row (token). Under torch.compile these casts are fused into the
kernels around them.

    y  = (X W') * sx * sw            X, W: values in e4m3, sx [tokens, 1], sw [1, outputs]
    dx = (G W) * sg                  G, sg: the rounded rows of dy * sw, so the weight's scales go into the gradient

Both passes multiply with the same rounded weight. GPUs need the second operand in column-major order, which the forward
pass has and the backward pass has not. `layouts="both"` keeps a transposed copy, so that nothing is transposed in a
step; `layouts="one"` saves that memory and transposes in every backward pass.

int8: one scale per row of the weight; activations are not quantized.

    W  = round(w / s), s = max |w| of the row / 127        [out, in] in int8, [out, 1] in fp32
    y  = x (W s)'         dx = dy (W s)

Both passes multiply with the same weight, which is dequantized to the compute dtype and freed again. This saves memory
but no time, on any device. A step saves nothing but the int8 weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune import kernels
from gracetune.errors import ConfigError, Problem
from gracetune.kernels import E4M3, E4M3_MAX, E4M3_SMALLEST_ROW
from gracetune.models.footprint import FP8_CAPABILITY
from gracetune.models.spec import Fp8Layouts


class EightBitLinear(nn.Linear):
    """A linear layer whose weight is an 8-bit buffer with scales.

    `weight` is a property that dequantizes on access. Code that reads it (DoRA, merging, saving) therefore sees the
    values this layer multiplies with, never the 8-bit values without their scales.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        """`weight` is [out, in], in any precision. It is quantized by the subclass and not kept."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.plain_weight()

    def plain_weight(self) -> Tensor:
        """The dequantized weight [out, in] in bf16, as a new tensor."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move this layer's buffers but never cast them: 8-bit values and fp32 scales would lose their meaning."""
        own = {id(buffer) for buffer in self._buffers.values()}

        def moved_only(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in own and result.dtype != tensor.dtype else result

        super()._apply(moved_only, recurse)  # type: ignore[no-untyped-call]
        return self


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a linear layer returns for this input, under autocast or without it."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


# -- fp8 ---------------------------------------------------------------------------------------------------------------


FP8_SIDE: Final = 16
"""Both sides of a matrix must be a multiple of this; the matrix units support nothing else."""
_PROBED: Final = 256
"""Side of the matrices `check_fp8` multiplies. As large as real layers: a library may reject the smallest size only."""


class Fp8Linear(EightBitLinear):
    """A frozen linear layer that multiplies in fp8."""

    fp8_values: Tensor
    """[out, in]"""
    fp8_scales: Tensor
    """[1, out]"""
    fp8_transposed: Tensor | None
    """[in, out]: the same values transposed, or None with one layout."""
    fp8_ones: Tensor
    """[1, in]: the weight's scales in the backward pass, where the real ones are already part of the gradient."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, layouts: Fp8Layouts = "both") -> None:
        super().__init__(weight, bias)
        values, scales = quantize_rows(weight.detach())
        self.register_buffer("fp8_values", values)
        self.register_buffer("fp8_scales", scales.t().contiguous())
        self.register_buffer("fp8_transposed", values.t().contiguous() if layouts == "both" else None)
        self.register_buffer("fp8_ones", torch.ones(1, self.in_features, device=weight.device))

    def plain_weight(self) -> Tensor:
        return (self.fp8_values.float() * self.fp8_scales.t()).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype a linear layer would return."""
        rows = x.reshape(-1, self.in_features)
        result: Tensor = _Fp8Product.apply(  # type: ignore[no-untyped-call]
            rows, self.fp8_values, self.fp8_transposed, self.fp8_scales, self.fp8_ones, self.bias
        )  # fmt: skip
        return result.reshape(*x.shape[:-1], self.out_features).to(compute_dtype(x))

    def extra_repr(self) -> str:
        layouts = "one layout" if self.fp8_transposed is None else "both layouts"
        return f"{super().extra_repr()}, e4m3 in {layouts}"


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [n, k] to e4m3 values and fp32 scales [n, 1]. A NaN makes its whole row NaN."""
    wide = x.float()
    most = wide.abs().amax(dim=1, keepdim=True).clamp_min(E4M3_SMALLEST_ROW)
    values = (wide * (E4M3_MAX / most)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return values, most / E4M3_MAX


def _rounded(x: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of x, multiplied by `columns` if given.

    torch's compiler fuses the rounding into the preceding kernel and then computes all of that twice, once for the
    scale and once for the values. Our kernel reads each row once.
    """
    if kernels.use_kernels(x):
        from gracetune.kernels.fp8_rows import rounded_rows  # triton is only installed with CUDA builds of torch

        rounded: tuple[Tensor, Tensor] = rounded_rows(x, columns)
        return rounded
    return quantize_rows(x if columns is None else x.float() * columns)


def fp8_product(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, bias: Tensor | None) -> Tensor:
    """left [n, k] times right [k, m], row-major and column-major, with scales [n, 1] and [1, m]; in bf16."""
    if left.device.type == "cuda":
        return torch._scaled_mm(
            left, right, scale_a=left_scales, scale_b=right_scales, bias=None if bias is None else bias.bfloat16(),
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
    return _plain_fp8_product(left, right, left_scales, right_scales, bias)


def _plain_fp8_product(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, bias: Tensor | None
) -> Tensor:  # fmt: skip
    """The same result on devices without such a product: summed in fp32, rounded once."""
    with torch.autocast("cpu", enabled=False):  # autocast would multiply in bf16; other devices do not get here
        result = torch.mm(left.float(), right.float()) * left_scales * right_scales
    return (result if bias is None else result + bias.float()).to(torch.bfloat16)


class _Fp8Product(torch.autograd.Function):
    """Saves no activation: the input's gradient needs only the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, columns: Tensor | None, scales: Tensor, ones: Tensor, bias: Tensor | None
    ) -> Tensor:  # fmt: skip
        ctx.has_both = columns is not None
        ctx.dtype = x.dtype
        ctx.save_for_backward(values if columns is None else columns, scales, ones)
        rounded, own = _rounded(x, None)
        return fp8_product(rounded, values.t(), own, scales, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        held, scales, ones = ctx.saved_tensors
        by_columns = held.t() if ctx.has_both else held.t().contiguous().t()
        rounded, own = _rounded(gradient, scales)
        return fp8_product(rounded, by_columns, own, ones, None).to(ctx.dtype), None, None, None, None, None


# -- device support ----------------------------------------------------------------------------------------------------


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError if this GPU or torch cannot multiply in fp8. A CPU computes the same numbers, slowly."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        found = f"fp8, on a GPU of compute capability {capability[0]}.{capability[1]}"
        raise ConfigError([_problem(found, f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or later (Hopper)")])
    try:
        values, scales = quantize_rows(torch.ones(_PROBED, _PROBED, device=device))
        fp8_product(values, values.t(), scales, scales.t(), None)
    except RuntimeError as error:
        found = f"fp8, which torch does not support here: {str(error).strip().splitlines()[0]}"
        raise ConfigError([_problem(found, "a product of e4m3 matrices with a scale for each row")]) from error


def _problem(found: str, expected: str) -> Problem:
    hint = "--set model.base_precision=auto (bf16 where the plan fits, else int8)"
    return Problem("model.base_precision", found, expected, hint)


# -- int8 --------------------------------------------------------------------------------------------------------------


_INT8_MOST: Final = 127.0
_INT8_SMALLEST: Final = 2.0**-100
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
        scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(_INT8_SMALLEST) / _INT8_MOST
        # A row with a NaN or infinity gets a non-finite scale and becomes non-finite as a whole: the first loss shows
        # it.
        self.register_buffer("int8_values", (wide / scales).round().to(torch.int8))
        self.register_buffer("int8_scales", scales)

    def plain_weight(self) -> Tensor:
        return _dequantized(self.int8_values, self.int8_scales, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        result: Tensor = _Int8Product.apply(x.to(dtype), self.int8_values, self.int8_scales, bias)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


def _dequantized(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (values * scales).to(dtype)


@torch.library.custom_op("gracetune::through_int8", mutates_args=())
def _through(gradient: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """The gradient of the input. A custom operator, because torch.compile would otherwise save the 16-bit weight of the
    forward pass for it, at twice the memory of int8."""
    return gradient @ _dequantized(values, scales, gradient.dtype)


@_through.register_fake
def _(gradient: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], values.shape[1])


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, scales)
        return F.linear(x, _dequantized(values, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        values, scales = ctx.saved_tensors
        return _through(gradient, values, scales), None, None, None
