"""The base class of frozen linear layers that store their weight in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


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
