"""Krea 2's data requirements: sides in whole patches."""

from __future__ import annotations

from gracetune.models.footprint import geometry_from
from gracetune.models.krea2.footprint import FOOTPRINTS

GEOMETRIES = {footprint.flavour: geometry_from(footprint) for footprint in FOOTPRINTS}
