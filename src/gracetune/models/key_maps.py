"""The names of every family's layers in one place."""

from __future__ import annotations

from gracetune.models.family_parts import FamilyParts
from gracetune.models.keys import KeyMap

KEY_MAPS: FamilyParts[KeyMap] = FamilyParts("keys", "KEYS")
"""By family, in the order of `config.families`."""
