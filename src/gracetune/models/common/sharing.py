"""Layers that are told more than their input: whose neighbours have the same, or what it was made of.

Those that can do something with that, do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class SharesInput(nn.Module):
    """A layer that may compute its answer together with its neighbours'."""

    def together(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """The answers of all `layers`, of which this is the first."""
        raise NotImplementedError


def answers(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    first = layers[0]
    if isinstance(first, SharesInput):
        return first.together(x, layers)
    return tuple(layer(x) for layer in layers)


class TakesGelu(nn.Module):
    """A layer that may take the step back through the GELU before it together with its own."""

    def of_gelu(self, h: Tensor) -> Tensor:
        raise NotImplementedError


def of_gelu(h: Tensor, layer: nn.Module) -> Tensor:
    """The layer's answer to gelu(h), tanh's form of it."""
    if isinstance(layer, TakesGelu):
        return layer.of_gelu(h)
    result: Tensor = layer(F.gelu(h, approximate="tanh"))
    return result
