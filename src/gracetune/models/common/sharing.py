"""Layers that are given the same input, asked together: those that can do something with that, do."""

from __future__ import annotations

from collections.abc import Sequence

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
