"""The latent encoder of all image families. Their VAEs differ only in a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from gracetune.cache.encoder import EncoderId
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.data.refs import SampleRef
from gracetune.models.common.encoding import VaeEncoder, latent_mask, sample_posterior
from gracetune.models.spec import EncodeOptions

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


def nothing_more(sample: Sample) -> Entry:
    """The default of `ImageCodec.more`."""
    return {}


@dataclass(frozen=True)
class ImageCodec:
    """How one family's VAE is used. The denoiser gets latents as (z - offset) x scale, per channel and place."""

    offset: tuple[float, ...] | Tensor
    scale: tuple[float, ...] | Tensor
    dtype: torch.dtype
    """Dtype of the returned latents."""
    patch: int = 1
    """`offset` and `scale` have a value for each place in a square of this side, row by row within a channel."""
    video: bool = False
    """Whether the VAE expects images as videos of one frame."""
    references: int | None = 0
    """The most references an edit pair may have; None for any number."""
    more: Callable[[Sample], Entry] = nothing_more
    """Other conditioning of a sample, computed from its ref alone."""


class ImageLatents(VaeEncoder):
    """Satisfies `cache.encoder.LatentEncoder`."""

    def __init__(self, vae: Any, identity: EncoderId, codec: ImageCodec, options: EncodeOptions) -> None:
        super().__init__(vae, identity, options)
        self._codec = codec
        self._device, self._dtype = vae.device, vae.dtype

    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        if not samples:
            return []
        entries: list[Entry] = [{"latents": latents} for latents in self._latents(samples)]
        for number in range(self._references(samples)):
            references = [sample.conditioning[number] for sample in samples]
            for entry, latents in zip(entries, self._latents(references), strict=True):
                entry[f"conditioning_latents_{number}"] = latents
        for sample, entry in zip(samples, entries, strict=True):
            if sample.mask is not None:
                entry["loss_mask"] = latent_mask(sample.mask, entry["latents"].shape[-2:])
            entry.update(self._codec.more(sample))
        return entries

    def beside(self, ref: SampleRef) -> Entry:
        """The part of an entry that needs no pixels. Satisfies `cache.encoder.DescribesEntries`."""
        return self._codec.more(Sample(ref, None, None, None, ()))

    def _references(self, samples: Sequence[Sample]) -> int:
        count, most = len(samples[0].conditioning), self._codec.references
        for sample in samples:
            if most is not None and len(sample.conditioning) > most:
                takes = f"supports at most {most}" if most else "supports none: it does not edit"
                raise DataError(f"{sample.ref.path}: has {len(sample.conditioning)} references, but this model {takes}")
            if len(sample.conditioning) != count:
                raise DataError(f"{sample.ref.path}: its number of references differs from the rest of its batch")
        return count

    @torch.no_grad()
    def _latents(self, samples: Sequence[Sample]) -> list[Tensor]:
        pixels = torch.stack([_image_pixels(sample) for sample in samples]).to(self._device, self._dtype)
        # Some VAEs need a time dimension: [B, C, 1, H, W].
        posterior = self._vae.encode(pixels[:, :, None] if self._codec.video else pixels).latent_dist
        latents = sample_posterior(posterior, samples, self._options.posterior).float()
        latents = latents[:, :, 0] if self._codec.video else latents
        offset, scale = (
            _per_channel(values, latents, self._codec.patch) for values in (self._codec.offset, self._codec.scale)
        )
        # Copies, so that an entry does not keep the whole batch's memory alive.
        return [one.to("cpu", self._codec.dtype, copy=True) for one in (latents - offset) * scale]


def _image_pixels(sample: Sample) -> Tensor:
    if sample.pixels is None or sample.pixels.ndim != 3:
        found = "audio" if sample.pixels is None else "video"
        raise DataError(f"{sample.ref.path}: found {found}, but this model trains on images only")
    return sample.pixels


def _per_channel(values: tuple[float, ...] | Tensor, like: Tensor, patch: int) -> Tensor:
    """[C, 1, 1], or [C, H, W] with the values of a patch side by side."""
    squares = torch.as_tensor(values, device=like.device).reshape(-1, patch, patch)
    return squares if patch == 1 else squares.repeat(1, like.shape[-2] // patch, like.shape[-1] // patch)


def to_image(sample: Sample) -> Image.Image:
    """The image as it was before `data.media.load.to_pixels`, bit for bit."""
    bytes_ = _image_pixels(sample).add(1.0).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(bytes_.permute(1, 2, 0).numpy())
