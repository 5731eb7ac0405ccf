"""The parts of every model family, by the family's name: ours, and those of installed packages.

A part is one attribute of one module of the family's package, imported on first access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from gracetune.config.families import FAMILIES, PACKAGES, FamilyPackages, find_flavour, flavours, reject_another_name
from gracetune.config.run_config import Model
from gracetune.config.spelling import nearest
from gracetune.data.geometry import Geometry
from gracetune.errors import ConfigError, Problem
from gracetune.models.footprint import Footprint
from gracetune.models.keys import KeyMap

if TYPE_CHECKING:
    from torch import nn

    from gracetune.models.spec import ModelSpec


Part = TypeVar("Part")


class FamilyParts(Mapping[str, Part]):
    """A mapping from family to the attribute `name` of its submodule `module`, in the order of `config.families`."""

    def __init__(self, module: str, name: str, packages: FamilyPackages = PACKAGES) -> None:
        self._module, self._name, self._packages = module, name, packages

    def __getitem__(self, family: str) -> Part:
        if family not in self:
            raise KeyError(family)
        part: Part = self._packages.part(family, self._module, self._name)
        return part

    def __contains__(self, family: object) -> bool:
        return family in self._packages.names

    def __iter__(self) -> Iterator[str]:
        yield from self._packages.names

    def __len__(self) -> int:
        return len(self._packages.names)


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


KEY_MAPS: FamilyParts[KeyMap] = FamilyParts("keys", "KEYS")
"""Family -> its key map, in the order of `config.families`."""


_PUBLISHED: FamilyParts[Callable[[str], nn.Module]] = FamilyParts("published", "build_published")


def build_published(family: str, flavour: str) -> nn.Module:
    """The denoiser of one flavour. Both experts of a two-expert model have the same shape."""
    if find_flavour(family, flavour) is None:
        names = [supported.name for supported in flavours(family)]
        raise ConfigError([Problem("--flavour", flavour, ", ".join(names), nearest(flavour, names) or names[0])])
    return _PUBLISHED[family](flavour)


ExampleInputs = Callable[..., Mapping[str, Any]]
"""(model, batch=, rows=, columns=, text=) -> a denoiser's named arguments for an image of rows x columns tokens and a
caption, made on the current device."""

_EXAMPLE_INPUTS: FamilyParts[ExampleInputs] = FamilyParts("published", "example_inputs")


def example_inputs_of(family: str) -> ExampleInputs:
    """How to call a family's denoiser to trace it (`planning.tracing`)."""
    return _EXAMPLE_INPUTS[family]
