"""What AuraFlow asks of its data: sides in whole patches."""

from __future__ import annotations

from gracetune.extension import geometry_from
from gracetune_auraflow.footprint import FOOTPRINTS

GEOMETRIES = {footprint.flavour: geometry_from(footprint) for footprint in FOOTPRINTS}
