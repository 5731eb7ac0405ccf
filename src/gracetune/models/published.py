"""The denoisers of the published weights without their weights: names and shapes, on the meta device.

For questions about a model nobody has downloaded here. Each family's `published.py` builds its own, with the numbers of
the config files published with each set of weights; what is not named there is diffusers' default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gracetune.config.families import find_flavour, flavours
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.models.family_parts import FamilyParts

if TYPE_CHECKING:
    from torch import nn

_BUILDERS: FamilyParts[Callable[[str], nn.Module]] = FamilyParts("published", "build_published")


def build_published(family: str, flavour: str) -> nn.Module:
    """The denoiser of one flavour; both experts of a dual model look the same."""
    if find_flavour(family, flavour) is None:
        names = [known.name for known in flavours(family)]
        raise ConfigError([Problem("--flavour", flavour, ", ".join(names), nearest(flavour, names) or names[0])])
    return _BUILDERS[family](flavour)
