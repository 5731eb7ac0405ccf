"""Wan's data requirements: sides in whole patches, 4k+1 frames."""

from __future__ import annotations

from gracetune.models.footprint import geometry_from
from gracetune.models.wan.footprint import FOOTPRINTS

_FPS = {"ti2v-5b-2.2": 24.0}
_DEFAULT_FPS = 16.0
"""Frame rate of the training clips of all other weights."""

GEOMETRIES = {
    footprint.flavour: geometry_from(footprint, fps=_FPS.get(footprint.flavour, _DEFAULT_FPS))
    for footprint in FOOTPRINTS
}
