"""What frozen linear layers in 8 bits have in common, however they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class EightBitLinear(nn.Linear):
    """Its weight is a buffer in 8 bits with scales. `weight` is not a parameter, but made when it is asked for: DoRA, a
    merge and a file read the numbers this layer multiplies with, never the 8-bit ones without their scales."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        """Of a weight [out, in] in any precision, which is not kept."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.plain_weight()

    def plain_weight(self) -> Tensor:
        """A copy of what this layer multiplies with, in bf16; [out, in]."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A model that is cast keeps these: without their precision they would be other numbers."""
        own = {id(buffer) for buffer in self._buffers.values()}

        def exact(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in own and moved.dtype != tensor.dtype else moved

        super()._apply(exact, recurse)  # type: ignore[no-untyped-call]
        return self


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision a linear layer answers this input in."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
