"""Every family and where its parts are: the one place that lists them all."""

from __future__ import annotations

from types import MappingProxyType

from gracetune.config.families import flavours
from gracetune.config.run_config import Model
from gracetune.memory.footprint import Footprint
from gracetune.models.flux.footprint import FOOTPRINTS as FLUX
from gracetune.models.qwen_image.footprint import FOOTPRINTS as QWEN_IMAGE
from gracetune.models.sdxl.footprint import FOOTPRINTS as SDXL
from gracetune.models.stable_audio.footprint import FOOTPRINTS as STABLE_AUDIO
from gracetune.models.wan.footprint import FOOTPRINTS as WAN

FOOTPRINTS = MappingProxyType(
    {"wan": WAN, "qwen_image": QWEN_IMAGE, "flux": FLUX, "sdxl": SDXL, "stable_audio": STABLE_AUDIO}
)
"""Family -> the footprints of its flavours, in the order of `config.families`."""


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
