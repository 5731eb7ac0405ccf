"""Operators that save what a device's own operators save, for models on the meta device.

The meta device computes attention with its matrix, which no device does. Modes of `torch.overrides` replace these
operators while a model is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

TracedDevice = Literal["cuda", "cpu"]
"""The device whose operators are traced."""
Operators = Mapping[Any, Callable[..., Any]]


class ReplacedOperators(TorchFunctionMode):
    """Calls other functions in place of torch's while it is active."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operators.get(func, func)(*args, **(kwargs or {}))


def operators_of(device: TracedDevice, *, compiled: bool = False) -> ReplacedOperators:
    """The operators of a device. torch's compiler decomposes norms itself, and knows the cost of flash attention."""
    if device == "cpu":
        return ReplacedOperators({F.scaled_dot_product_attention: _attention_on_cpu})
    if compiled:
        return ReplacedOperators({F.scaled_dot_product_attention: _attention_on_cuda})
    return ReplacedOperators({F.scaled_dot_product_attention: _attention_on_cuda, F.rms_norm: _rms_norm_on_cuda})


def _attention_on_cuda(query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **_options: Any) -> Tensor:
    """Queries, keys and values [B, heads, tokens, head size]. Saves them, the result and a number per row."""
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, False, False)[0]
    return result


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **_options: Any) -> Tensor:
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value)[0]
    return result


def _for_each_head(query: Tensor, shared: Tensor) -> Tensor:
    """Keys or values that several query heads share, once for each (`enable_gqa`)."""
    repeats = query.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=1)


def _rms_norm_on_cuda(x: Tensor, _shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    result: Tensor = _RmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    """CUDA's fused norm: it saves its input and one number per row, and no copy in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        x, weight, _rows = ctx.saved_tensors
        needs = weight is not None and weight.requires_grad
        return torch.empty_like(x), torch.empty_like(weight) if needs else None
