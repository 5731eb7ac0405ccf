"""Write the traced footprints of the families in this package: src/gracetune/models/<family>/traced.json.

    python scripts/trace_footprints.py [FAMILY ...]

Run it after a release of torch or diffusers, or a change of the tracer, and read the difference. A test traces one
flavour again. Families whose footprints list their blocks are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gracetune.models.footprint_tables import FILE, TracedTable
from gracetune.models.registry import FOOTPRINTS, build_published
from gracetune.planning.tracing.families import trace_family
from gracetune.planning.tracing.store import dumped

MODELS = Path(__file__).resolve().parents[1] / "src" / "gracetune" / "models"


def tables_of(family: str) -> dict[str, TracedTable]:
    """Flavour -> its table. Flavours of the same configuration are traced once."""
    tables: dict[str, TracedTable] = {}
    traced: dict[str, TracedTable] = {}
    for footprint in FOOTPRINTS[family]:
        config = str(build_published(family, footprint.flavour).config)
        if config not in traced:
            traced[config] = trace_family(footprint)
        tables[footprint.flavour] = traced[config]
    return tables


def main(families: list[str]) -> None:
    for family in families:
        tables = tables_of(family)
        file = MODELS / family / FILE
        file.write_bytes(dumped(tables))
        print(f"{file}: {', '.join(tables)}")


if __name__ == "__main__":
    main(sys.argv[1:] or [folder.parent.name for folder in sorted(MODELS.glob(f"*/{FILE}"))])
