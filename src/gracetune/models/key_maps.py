"""The layer names of every family."""

from __future__ import annotations

from gracetune.models.family_parts import FamilyParts
from gracetune.models.keys import KeyMap

KEY_MAPS: FamilyParts[KeyMap] = FamilyParts("keys", "KEYS")
"""Family -> its key map, in the order of `config.families`."""
