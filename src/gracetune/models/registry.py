"""The parts of every family, by the family's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gracetune.config.families import FAMILIES, flavours, reject_another_name
from gracetune.config.run_config import Model
from gracetune.config.spelling import nearest
from gracetune.data.geometry import Geometry
from gracetune.errors import ConfigError, Problem
from gracetune.models.family_parts import FamilyParts
from gracetune.models.footprint import Footprint

if TYPE_CHECKING:
    from gracetune.models.spec import ModelSpec

FOOTPRINTS: FamilyParts[tuple[Footprint, ...]] = FamilyParts("footprint", "FOOTPRINTS")
"""Family -> the footprints of its flavours, in the order of `config.families`."""

GEOMETRIES: FamilyParts[Mapping[str, Geometry]] = FamilyParts("geometry", "GEOMETRIES")
"""Family -> flavour -> its data requirements."""

_SPECS: FamilyParts[ModelSpec] = FamilyParts("spec", "SPEC")


def footprint_of(model: Model) -> tuple[Footprint, str | None]:
    """The footprint of the model a config trains, and the assumption behind it if the config names no flavour."""
    supported = FOOTPRINTS[model.family]
    if model.flavour is not None:
        return next(footprint for footprint in supported if footprint.flavour == model.flavour), None
    first = supported[0]
    if model.path is None:
        return first, None
    weights = {flavour.weights: flavour.name for flavour in flavours(model.family)}
    named = weights.get(model.path)
    if named is not None:
        return next(footprint for footprint in supported if footprint.flavour == named), None
    return first, f"model.path {model.path}: assumed to be {first.flavour}; if it is another, set model.flavour"


def geometry(family: str, flavour: str) -> Geometry:
    """The data requirements of one flavour."""
    return GEOMETRIES[family][flavour]


def geometry_of(model: Model) -> tuple[Geometry, str | None]:
    """The data requirements of the model a config trains, and the assumption behind it, as in `footprint_of`."""
    footprint, assumption = footprint_of(model)
    return geometry(footprint.family, footprint.flavour), assumption


def spec_of(family: str) -> ModelSpec:
    """A family's `ModelSpec`. This imports its model code, which takes seconds; nothing above needs that."""
    if family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError([Problem("model.family", family, supported, nearest(family, FAMILIES) or supported)])
    spec = _SPECS[family]
    reject_another_name(family, "SPEC.keys", spec.keys)
    return spec
