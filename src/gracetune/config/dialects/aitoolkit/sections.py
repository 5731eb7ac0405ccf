"""What all tables of the ai-toolkit dialect share."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.table import Key, Rule, Table

PEER = "ai-toolkit"
HARMLESS = "harmless here, and not used"


def section(*entries: Key | Rule[Any]) -> Table[Any]:
    """The table of one mapping of a job."""
    return Table(
        *entries,
        expected="a key that ai-toolkit knows in {section}",
        otherwise="remove it: ai-toolkit ignores a key it does not know, here it is an error",
    )
