"""Stable Audio's data requirements: stereo, in whole latent columns."""

from __future__ import annotations

from gracetune.models.footprint import geometry_from
from gracetune.models.stable_audio.footprint import FOOTPRINTS

_STEREO = 2

GEOMETRIES = {footprint.flavour: geometry_from(footprint, channels=_STEREO) for footprint in FOOTPRINTS}
