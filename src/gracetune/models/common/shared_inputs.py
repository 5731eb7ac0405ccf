"""Calling several layers on the same input, so that adapters can compute their outputs together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class SharesInput(nn.Module):
    """A layer that can compute its output together with those of its neighbours."""

    def together(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """The outputs of all `layers`, of which this is the first."""
        raise NotImplementedError


def answers(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of `layers` for the input `x`."""
    first = layers[0]
    if isinstance(first, SharesInput):
        return first.together(x, layers)
    return tuple(layer(x) for layer in layers)
