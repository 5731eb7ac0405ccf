"""What configuration files call AuraFlow. The first flavour is the one taken when a config names none."""

from __future__ import annotations

from gracetune.extension import AiToolkitNames, Arch, FamilyNames, Flavour
from gracetune_auraflow import FAMILY

NAMES = FamilyNames(
    FAMILY,
    (Flavour("v0.3", "fal/AuraFlow-v0.3", "image"),),
    objective="flow",
    aitoolkit=AiToolkitNames(archs={FAMILY: Arch(("v0.3",))}),
)
