"""Packing latents into tokens of 2 x 2 latent pixels (Flux, Qwen-Image), and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile

from torch import Tensor

PATCH = 2


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 x W/2, C x 4]: tokens row by row; a token has the four values of each channel in turn."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`, for latents of `height` x `width`."""
    batch, _, values = tokens.shape
    squares = tokens.reshape(batch, height // PATCH, width // PATCH, values // PATCH**2, PATCH, PATCH)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)


def references_of(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The reference latents of an edit pair, in order; empty if there are none."""
    names = (f"conditioning_latents_{number}" for number in count())
    return [batch[name] for name in takewhile(batch.__contains__, names)]
