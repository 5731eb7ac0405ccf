"""SDXL's data requirements: latents that every level of the U-Net can halve evenly."""

from __future__ import annotations

import math

from gracetune.models.footprint import geometry_from
from gracetune.models.sdxl.footprint import BOTTOM, FOOTPRINTS, TOP

_HALVED = math.isqrt(int(TOP / BOTTOM))
"""Latent pixels per side at the top for one at the bottom."""

GEOMETRIES = {footprint.flavour: geometry_from(footprint, halved=_HALVED) for footprint in FOOTPRINTS}
