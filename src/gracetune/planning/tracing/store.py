"""The footprints of families that declare no blocks: traced once, then read from the user's cache folder.

A file is named by a digest of the family's code, the flavour, the versions of torch and diffusers, and the tracer's
version. With a warm cache no torch is imported.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gracetune.config.families import PACKAGES
from gracetune.models.footprint import Footprint
from gracetune.models.footprint_tables import FORMAT, TRACER, TracedTable, as_json, from_json, read_tables
from gracetune.storage.atomic import write_file
from gracetune.storage.folders import make_private_folder

_LIBRARIES = ("torch", "diffusers")


def with_blocks(footprint: Footprint, cache: Path | None) -> Footprint:
    """The footprint itself if it declares blocks, else with those of a trace. `cache` is gracetune's cache folder."""
    if footprint.blocks:
        return footprint
    table = _read(footprint, cache) or _trace(footprint, cache)
    return replace(footprint, parameters=table.parameters, width=table.width, blocks=table.blocks)


def _file(footprint: Footprint, cache: Path) -> Path:
    return cache / "footprints" / f"{footprint.family}-{footprint.flavour}-{_digest(footprint)[:20]}.json"


def _digest(footprint: Footprint) -> str:
    digest = hashlib.sha256(f"{footprint.flavour}\0{TRACER}\0{json.dumps(versions())}".encode())
    for file in sorted(PACKAGES.folder(footprint.family).glob("*.py")):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """The libraries that a trace depends on."""
    return {name: version(name) for name in _LIBRARIES}


def _read(footprint: Footprint, cache: Path | None) -> TracedTable | None:
    if cache is None:
        return None
    try:
        return from_json(read_tables(_file(footprint, cache))["tables"][footprint.flavour])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: it is written again


def _trace(footprint: Footprint, cache: Path | None) -> TracedTable:
    from gracetune.planning.tracing.families import trace_family  # imports torch

    table = trace_family(footprint)
    if cache is not None:
        file = _file(footprint, cache)
        try:
            make_private_folder(file.parent)
            write_file(file, dumped({footprint.flavour: table}))
        except OSError:
            pass  # without a cache the next plan only takes longer
    return table


def dumped(tables: dict[str, TracedTable]) -> bytes:
    """A file of tables (`models.footprint_tables`)."""
    data = {
        "format": FORMAT, "tracer": TRACER, "versions": versions(),
        "tables": {name: as_json(table) for name, table in tables.items()},
    }  # fmt: skip
    return (json.dumps(data, indent=1) + "\n").encode()
