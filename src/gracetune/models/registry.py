"""Every family and where its parts are: the one place that lists them all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gracetune.config.families import INSTALLED, flavours
from gracetune.config.installed_families import refuse_another_name
from gracetune.config.run_config import Model
from gracetune.config.spelling import nearest
from gracetune.data.geometry import Geometry
from gracetune.errors import ConfigError, Problem
from gracetune.models.flux.footprint import FOOTPRINTS as FLUX
from gracetune.models.flux.geometry import GEOMETRIES as FLUX_GEOMETRIES
from gracetune.models.footprint import Footprint
from gracetune.models.installed import WithInstalled
from gracetune.models.qwen_image.footprint import FOOTPRINTS as QWEN_IMAGE
from gracetune.models.qwen_image.geometry import GEOMETRIES as QWEN_IMAGE_GEOMETRIES
from gracetune.models.sdxl.footprint import FOOTPRINTS as SDXL
from gracetune.models.sdxl.geometry import GEOMETRIES as SDXL_GEOMETRIES
from gracetune.models.stable_audio.footprint import FOOTPRINTS as STABLE_AUDIO
from gracetune.models.stable_audio.geometry import GEOMETRIES as STABLE_AUDIO_GEOMETRIES
from gracetune.models.wan.footprint import FOOTPRINTS as WAN
from gracetune.models.wan.geometry import GEOMETRIES as WAN_GEOMETRIES

if TYPE_CHECKING:
    from gracetune.models.spec import ModelSpec

FOOTPRINTS = WithInstalled(
    {"wan": WAN, "qwen_image": QWEN_IMAGE, "flux": FLUX, "sdxl": SDXL, "stable_audio": STABLE_AUDIO},
    module="footprint",
    name="FOOTPRINTS",
)
"""Family -> the footprints of its flavours, in the order of `config.families`."""

GEOMETRIES = WithInstalled(
    {
        "wan": WAN_GEOMETRIES,
        "qwen_image": QWEN_IMAGE_GEOMETRIES,
        "flux": FLUX_GEOMETRIES,
        "sdxl": SDXL_GEOMETRIES,
        "stable_audio": STABLE_AUDIO_GEOMETRIES,
    },
    module="geometry",
    name="GEOMETRIES",
)
"""Family -> flavour -> what it asks of its data."""


def footprint_of(model: Model) -> tuple[Footprint, str | None]:
    """The footprint of what a config trains, and the assumption behind it where the config does not name a flavour."""
    known = FOOTPRINTS[model.family]
    if model.flavour is not None:
        return next(footprint for footprint in known if footprint.flavour == model.flavour), None
    first = known[0]
    if model.path is None:
        return first, None
    weights = {flavour.weights: flavour.name for flavour in flavours(model.family)}
    named = weights.get(model.path)
    if named is not None:
        return next(footprint for footprint in known if footprint.flavour == named), None
    return first, f"model.path {model.path}: taken to be {first.flavour}; set model.flavour if it is another"


def geometry(family: str, flavour: str) -> Geometry:
    """What one flavour asks of its data."""
    return GEOMETRIES[family][flavour]


def geometry_of(model: Model) -> tuple[Geometry, str | None]:
    """What the trained model asks of its data, and the assumption behind it, as for `footprint_of`."""
    footprint, assumption = footprint_of(model)
    return geometry(footprint.family, footprint.flavour), assumption


def spec_of(family: str) -> ModelSpec:
    """A family's whole bundle. Imports its model code, which takes seconds: nothing above needs that."""
    if family not in FOOTPRINTS:
        known = ", ".join(FOOTPRINTS)
        raise ConfigError([Problem("model.family", family, known, nearest(family, FOOTPRINTS) or known)])
    if INSTALLED.has(family):
        installed: ModelSpec = INSTALLED.part(family, "spec", "SPEC")
        refuse_another_name(family, "SPEC.keys", installed.keys)
        return installed
    module = importlib.import_module(f"gracetune.models.{family}.spec")
    spec: ModelSpec = module.SPEC
    return spec
