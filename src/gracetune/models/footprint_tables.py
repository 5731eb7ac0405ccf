"""Traced footprint blocks as JSON: what `planning.tracing` writes and footprints read. Imports no torch.

Format 1: `{"format": 1, "tracer": N, "versions": {...}, "tables": {FLAVOUR: {"parameters", "width", "blocks"}}}`.
Blocks have the fields of `FootprintBlock`; fields with their default value are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from gracetune.models.footprint import BudgetShare, FootprintBlock, FootprintKept, FootprintLinear
from gracetune.storage.regular_files import read_small_file

FORMAT: Final = 1
FILE: Final = "traced.json"
"""The tables of a family's flavours, beside its footprint.py. scripts/trace_footprints.py writes it."""
TRACER: Final = 2
"""Version of the tracer. Raise it with every change of what it measures, so that older tables are not used."""


@dataclass(frozen=True)
class TracedTable:
    """What a trace of one denoiser gives."""

    parameters: int
    width: int
    blocks: tuple[FootprintBlock, ...]


NOT_TRACED: Final = TracedTable(0, 0, ())
"""For a flavour without a table: its footprint has no blocks, so the first plan traces it."""


def as_json(table: TracedTable) -> dict[str, Any]:
    return {
        "parameters": table.parameters,
        "width": table.width,
        "blocks": [
            {
                **_fields(block),
                "kept": [_fields(kept) for kept in block.kept],
                "enters": [_fields(kept) for kept in block.enters],
                "working": [_fields(kept) for kept in block.working],
                "linears": [_fields(linear) for linear in block.linears],
                "budgets": [_fields(share) for share in block.budgets],
            }
            for block in table.blocks
        ],
    }


def from_json(data: Mapping[str, Any]) -> TracedTable:
    """Raises KeyError, TypeError or ValueError for a table of another form."""
    return TracedTable(int(data["parameters"]), int(data["width"]), tuple(_block(block) for block in data["blocks"]))


def tables_beside(module: str) -> dict[str, TracedTable]:
    """Flavour -> its table, from the file beside a family's module (`__file__`)."""
    tables = read_tables(Path(module).with_name(FILE))["tables"]
    return {flavour: from_json(table) for flavour, table in tables.items()}


def read_tables(path: Path) -> dict[str, Any]:
    """The content of a file of tables. Raises OSError or ValueError if it is not one of this format."""
    data = json.loads(read_small_file(path))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path}: not a file of traced footprints, format {FORMAT}")
    return data


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a record that differ from their defaults, without nested records."""
    return {
        one.name: _plain(value)
        for one in fields(record)
        if (value := getattr(record, one.name)) != _default(one) and one.name not in _NESTED
    }


_NESTED = ("kept", "enters", "working", "linears", "budgets")


def _default(one: Field[Any]) -> Any:
    return one.default if one.default is not MISSING else None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Fraction) else value


def _block(data: Mapping[str, Any]) -> FootprintBlock:
    rest = {key: value for key, value in data.items() if key not in _NESTED}
    if "tokens" in rest:
        rest["tokens"] = Fraction(rest["tokens"])
    kept, enters, working = (tuple(FootprintKept(**one) for one in data[name]) for name in _NESTED[:3])
    linears = tuple(FootprintLinear(**{**one, **_tuples(one)}) for one in data["linears"])
    budgets = tuple(BudgetShare(**one) for one in data.get("budgets", ()))
    return FootprintBlock(**rest, kept=kept, enters=enters, working=working, linears=linears, budgets=budgets)


def _tuples(data: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(data[name]) for name in ("kernel", "around") if name in data}
