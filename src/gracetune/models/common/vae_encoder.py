"""Shared by all latent encoders: slicing and tiling of the VAE, and the identity that depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gracetune.cache.encoder import EncoderId
from gracetune.models.common.encoding import release
from gracetune.models.spec import EncodeOptions


class VaeEncoder:
    """The part of a `cache.encoder.LatentEncoder` that is the same for images, clips and audio."""

    def __init__(self, vae: Any, identity: EncoderId, options: EncodeOptions, others: Sequence[nn.Module] = ()) -> None:
        """`vae` is a diffusers autoencoder. `identity` excludes tiling, which can be switched on later.

        `others` are further models that are freed with the encoder.
        """
        self._vae, self._options = vae, options
        self._identity, self._others = identity, others
        if options.slicing:
            vae.enable_slicing()
        if options.tiling:
            vae.enable_tiling()

    @property
    def id(self) -> EncoderId:
        """Includes tiling: overlapping tiles are blended, which is close to the untiled result but not equal."""
        tiling = ("tiling", "yes" if self._vae.use_tiling else "no")
        return replace(self._identity, settings=tuple(sorted((*self._identity.settings, tiling))))

    def save_memory(self) -> bool:
        """Enable slicing (one sample at a time, same values), then tiling (changes the id). False if both are on."""
        if not self._vae.use_slicing:
            self._vae.enable_slicing()
            return True
        if not self._vae.use_tiling:
            self._vae.enable_tiling()
            return True
        return False

    def close(self) -> None:
        release([self._vae, *self._others])
