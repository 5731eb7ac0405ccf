"""Loading: decodes a `SampleRef` to a `Sample`. The reference alone decides the result.

Shapes (C = 3 color channels in RGB order, F = frames, H = bucket height, W = bucket width):

    image         pixels        [C, H, W]             float32 in [-1, 1]
    video         pixels        [C, F, H, W]          float32 in [-1, 1]
    audio         audio         [channels, samples]   float32 in [-1, 1]
    masked loss   mask          [1, H, W]             float32 in [min_weight, 1]
    edit pairs    conditioning  one Sample for each of the reference's `conditioning`, in order

A mask has per-pixel weights of the loss. It is cropped and flipped exactly like its image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gracetune.data.backend import Backend
from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.media.audio import decode_audio
from gracetune.data.media.augment import augmented, augmented_mask
from gracetune.data.media.image import (
    MAX_PIXELS,
    Bytes,
    damage_named,
    decode_alpha,
    decode_image,
    eight_bits,
    fit_to_bucket,
    open_upright,
)
from gracetune.data.media.video import decode_video
from gracetune.data.refs import Bucket, Fit, MaskRef, SampleRef

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """A decoded sample on the CPU. It has either `pixels` or `audio`."""

    ref: SampleRef
    pixels: Tensor | None
    audio: Tensor | None
    mask: Tensor | None
    conditioning: tuple[Sample, ...]


@dataclass(frozen=True)
class DecodeLimits:
    max_pixels: int = MAX_PIXELS
    """Limit for an image or a video frame. Larger ones are rejected before decoding."""
    video_threads: int = 1
    """Decoder threads per video. Several samples are decoded at once, so more threads would compete for the cores."""


def load(ref: SampleRef, backend_of: Callable[[str], Backend], limits: DecodeLimits | None = None) -> Sample:
    """Decode one sample. `backend_of` returns a dataset's backend by its id.

    Raises UnreadableMediaError with the file (the sample, a mask or a reference) and its dataset.
    """
    limits = limits or DecodeLimits()
    conditioning = tuple(load(other, backend_of, limits) for other in ref.conditioning)
    with _belonging_to(ref.dataset):
        if ref.fit is None:
            audio = _audio(ref, backend_of(ref.dataset))
            return Sample(ref, pixels=None, audio=audio, mask=None, conditioning=conditioning)
        pixels = _pixels(ref, ref.fit, backend_of(ref.dataset), limits)
    mask = None
    if ref.mask is not None:
        with _belonging_to(ref.mask.dataset):
            mask = _mask(ref, ref.fit, ref.mask, backend_of(ref.mask.dataset), limits)
    return Sample(ref, pixels=pixels, audio=None, mask=mask, conditioning=conditioning)


@contextmanager
def _belonging_to(dataset: str) -> Iterator[None]:
    """Add the dataset to UnreadableMediaError."""
    try:
        yield
    except UnreadableMediaError as error:
        raise UnreadableMediaError(error.path, error.reason, dataset) from error


def _pixels(ref: SampleRef, fit: Fit, backend: Backend, limits: DecodeLimits) -> Tensor:
    if ref.clip is None:
        own_colours = ref.mask is not None and ref.mask.from_alpha
        data = backend.read(ref.path)
        image = decode_image(
            data, ref.path, fit, ref.bucket, own_colours=own_colours, canny=ref.canny, max_pixels=limits.max_pixels
        )
        return to_pixels(augmented([image], ref.augmentation, ref.digest))[:, 0]
    with backend.open(ref.path) as stream:
        frames = decode_video(
            stream, ref.path, ref.clip, fit, ref.bucket, threads=limits.video_threads, max_pixels=limits.max_pixels
        )
    return to_pixels(augmented(frames, ref.augmentation, ref.digest))


def _mask(ref: SampleRef, fit: Fit, mask: MaskRef, backend: Backend, limits: DecodeLimits) -> Tensor:
    import torch

    image = decode_mask(backend.read(mask.path), mask, fit, ref.bucket, limits.max_pixels)
    return torch.from_numpy(mask_weights(augmented_mask(image, ref.augmentation, ref.digest), mask))[None]


def _audio(ref: SampleRef, backend: Backend) -> Tensor:
    import torch

    if ref.clip is None:
        raise DataError(f"{ref.path}: a reference to audio without a clip")
    with backend.open(ref.path) as stream:
        return torch.from_numpy(decode_audio(stream, ref.path, ref.clip, ref.bucket))


def to_pixels(images: Sequence[Image.Image]) -> Tensor:
    """Images as a contiguous tensor [C, F, H, W] in [-1, 1]."""
    import torch

    frames = torch.from_numpy(np.stack([np.asarray(image) for image in images]))  # [F, H, W, C], 0 to 255
    pixels = frames.permute(3, 0, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return pixels.div_(127.5).sub_(1.0)


# -- masks -------------------------------------------------------------------------------------------------------------


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


def mask_weights(mask: Image.Image, ref: MaskRef) -> NDArray[np.float32]:
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
