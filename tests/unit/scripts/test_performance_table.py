"""README.md and docs/performance.md say what was measured, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gracetune.bench.step.suite import WAN14B
from unit.bench.step.test_suite import ROW

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_table", ROOT / "scripts" / "performance_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_documents_are_what_the_results_say(tables: ModuleType) -> None:
    for path in tables.DOCUMENTS:
        written = path.read_text(encoding="utf-8")
        assert written == tables.filled(path, tables.results()), "run: python scripts/performance_table.py"


def test_a_measured_row_becomes_a_line_and_a_smoke_test_does_not(tables: ModuleType) -> None:
    row: dict[str, Any] = {**asdict(ROW), "ok": False, "bar": "<= 470 ms", "versions": {"torch": "2.11"}}
    text = tables.steps([("steps-h200.json", {"rows": [row, {**row, "smoke": True}]})])
    assert len(text.splitlines()) == 3
    assert "<= 470 ms: **missed**" in text
    assert "60.0 (61.0)" in text
    short = tables.speed([("steps-h200.json", {"rows": [row, {**row, "smoke": True}]})])
    assert len(short.splitlines()) == 3
    assert "<= 470 ms: **missed**" in short
    assert tables.steps([("other.json", {"rows": [{"name": "speed", "value": 1}]})]) == tables.NOTHING


def test_every_bar_of_the_suite_is_written_down(tables: ModuleType) -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [name for name in WAN14B if f"| `{name}` |" not in text] == []


def test_other_programs_are_listed_with_their_commits_and_whose_figures_they_are(tables: ModuleType) -> None:
    """The figures were recorded by hand, so the record has to say what is not known of them."""
    found = [(name, result) for name, result in tables.results() if name == "peers-h200.json"]
    ((_, record),) = found
    assert record["provenance"]["samples_kept"] is False
    assert record["provenance"]["unknown"]
    lines = tables.peers(found).splitlines()
    assert len(lines) == 2 + len(record["rows"])
    assert "| SimpleTuner | bc8e6ab | LoRA | regional compile | 573.5 | 74.4 | 44 |" in lines
    assert "| musubi-tuner | not recorded | LoRA | eager | 813 | 95.8 | - |" in lines
    assert tables.peers([]) == tables.NOTHING
    for document in ("README.md", "docs/performance.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        assert "in one session on one" in text
        assert "recorded them by hand" in text
