"""What all tables of the ai-toolkit dialect share."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.table import Key, KeyRule, KeyTable

PEER = "ai-toolkit"
HARMLESS = "harmless here, and not used"


def section(*entries: Key | KeyRule[Any]) -> KeyTable[Any]:
    """The table of one mapping of a job."""
    return KeyTable(
        *entries,
        expected="a key that ai-toolkit knows in {section}",
        otherwise="remove it: ai-toolkit ignores a key it does not know, here it is an error",
    )
