"""RoPE with real numbers: rotates pairs of neighbouring channels in one expression."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) of x [..., channels] to (a cos - b sin, b cos + a sin). The tables are [..., pairs]."""
    pairs = x.unflatten(-1, (-1, 2))
    sign = 2 * torch.arange(2, device=x.device) - 1
    result = pairs * cos[..., None] + pairs.flip(-1) * (sin[..., None] * sign)
    return result.flatten(-2).to(x.dtype)  # type: ignore[no-any-return]
