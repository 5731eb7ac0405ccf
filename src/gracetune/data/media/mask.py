"""Masks for the masked loss: per-pixel weights, cropped and flipped exactly like their image."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.image import (
    MAX_PIXELS,
    Bytes,
    damage_named,
    decode_alpha,
    eight_bits,
    fit_to_bucket,
    open_upright,
)
from gracetune.data.refs import Bucket, Fit, MaskRef

_SAME_SHAPE = 0.02
"""Relative tolerance between the aspect ratios of mask and image, for rounded sizes."""


def decode_mask(data: Bytes, ref: MaskRef, fit: Fit, bucket: Bucket, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a mask to grayscale in the bucket's size. White areas are trained on. Its resolution may differ from the
    image's."""
    mask = decode_alpha(data, ref.path, max_pixels) if ref.from_alpha else _brightness(data, ref.path, max_pixels)
    width, height = fit.original
    if abs(mask.width * height / (mask.height * width) - 1) > _SAME_SHAPE:
        reason = f"a mask of {mask.width}x{mask.height} for an image of {width}x{height}; use the same aspect ratio"
        raise UnreadableMediaError(ref.path, reason)
    same = Fit(mask.size, fit.resized, fit.left, fit.top)
    # Bilinear, because Lanczos would cause ringing along sharp edges.
    return fit_to_bucket(mask, ref.path, same, bucket, Image.Resampling.BILINEAR)


def weights(mask: Image.Image, ref: MaskRef) -> NDArray[np.float32]:
    """The mask as loss weights: [H, W] in [min_weight, 1]."""
    share = np.asarray(mask, np.float32) / 255
    if ref.invert:
        share = 1 - share
    return np.asarray(ref.min_weight + (1 - ref.min_weight) * share, np.float32)


def _brightness(data: Bytes, path: str, max_pixels: int) -> Image.Image:
    """A mask image as grayscale. Transparent areas become black, because many editors export white on transparency."""
    with damage_named(path):
        mask = open_upright(data, path, max_pixels)
        if mask.mode.startswith(("I", "F")):
            return eight_bits(mask, path)
        if not mask.has_transparency_data:
            return mask.convert("L")
        black = Image.new("RGBA", mask.size, "black")
        return Image.alpha_composite(black, mask.convert("RGBA")).convert("L")
