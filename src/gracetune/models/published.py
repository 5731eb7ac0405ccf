"""The denoisers of published weights on the meta device: names and shapes without weights.

They answer questions about a model that is not on this machine. Each family's `published.py` builds its own, with the
values of the published config files. Values not listed there are diffusers' defaults.
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
    """The denoiser of one flavour. Both experts of a two-expert model have the same shape."""
    if find_flavour(family, flavour) is None:
        names = [supported.name for supported in flavours(family)]
        raise ConfigError([Problem("--flavour", flavour, ", ".join(names), nearest(flavour, names) or names[0])])
    return _BUILDERS[family](flavour)
