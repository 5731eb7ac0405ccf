"""FLUX.1's data requirements: sides in whole patches."""

from __future__ import annotations

from gracetune.models.flux.footprint import FOOTPRINTS
from gracetune.models.footprint import geometry_from

GEOMETRIES = {footprint.flavour: geometry_from(footprint) for footprint in FOOTPRINTS}
