"""Shared by the families' attention processors: RoPE, linear layers with a common input, contiguous gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) of x [..., channels] to (a cos - b sin, b cos + a sin). The tables are [..., pairs]."""
    pairs = x.unflatten(-1, (-1, 2))
    sign = 2 * torch.arange(2, device=x.device) - 1
    result = pairs * cos[..., None] + pairs.flip(-1) * (sin[..., None] * sign)
    return result.flatten(-2).to(x.dtype)  # type: ignore[no-any-return]


class SharesInput(nn.Module):
    """A layer that can compute its output together with those of its neighbours."""

    def together(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """The outputs of all `layers`, of which this is the first."""
        raise NotImplementedError


def apply_layers(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of `layers` for the input `x`."""
    first = layers[0]
    if isinstance(first, SharesInput):
        return first.together(x, layers)
    return tuple(layer(x) for layer in layers)


def contiguous_gradient(x: Tensor) -> Tensor:
    """`x`, with a contiguous gradient.

    Where an attention output is concatenated with another tensor, its gradient is a slice of one wide tensor, with
    strided rows. From such a gradient, cuDNN's backward pass computes wrong gradients without an error, or reads
    invalid memory (`families-exploration-h200.json`: cuDNN 9.19, torch 2.11).
    """
    result: Tensor = _ContiguousGradient.apply(x)  # type: ignore[no-untyped-call]
    return result


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
