"""Definitions shared by all tables of the ai-toolkit dialect."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.table import Key, KeyRule, KeyTable

PEER = "ai-toolkit"
HARMLESS = "harmless here, and not used"


def section(*entries: Key | KeyRule[Any]) -> KeyTable[Any]:
    """Build the table of one mapping of a job, with ai-toolkit's messages for unknown keys."""
    return KeyTable(
        *entries,
        expected="a key that ai-toolkit knows in {section}",
        otherwise="remove it: ai-toolkit ignores a key it does not know, here it is an error",
    )
