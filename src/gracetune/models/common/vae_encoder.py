"""What every latent encoder does with its VAE: slices and tiles, and the identity that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gracetune.cache.encoder import EncoderId
from gracetune.models.common.encoding import release
from gracetune.models.spec import EncodeOptions


class VaeEncoder:
    """The part of a `cache.encoder.LatentEncoder` that is the same for pictures, clips and sound."""

    def __init__(self, vae: Any, identity: EncoderId, options: EncodeOptions, others: Sequence[nn.Module] = ()) -> None:
        """`vae`: one of diffusers' autoencoders. `identity`: without the tiling, which can change while it works.

        `others` are the models beside the VAE that end with the encoder.
        """
        self._vae, self._options = vae, options
        self._identity, self._others = identity, others
        if options.slicing:
            vae.enable_slicing()
        if options.tiling:
            vae.enable_tiling()

    @property
    def id(self) -> EncoderId:
        """Tiles overlap and are blended: close to the whole, but not equal."""
        tiling = ("tiling", "yes" if self._vae.use_tiling else "no")
        return replace(self._identity, settings=tuple(sorted((*self._identity.settings, tiling))))

    def save_memory(self) -> bool:
        """First one sample at a time, which changes no value; asked again, in tiles, which changes the id."""
        if not self._vae.use_slicing:
            self._vae.enable_slicing()
            return True
        if not self._vae.use_tiling:
            self._vae.enable_tiling()
            return True
        return False

    def close(self) -> None:
        release([self._vae, *self._others])
