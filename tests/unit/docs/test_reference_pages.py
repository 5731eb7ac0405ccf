"""The reference pages that scripts/reference_pages.py makes are up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from gracetune.cache import folders
from gracetune.checkpoint import manifest
from gracetune.config import native
from gracetune.data.loader import STATE_VERSION
from gracetune.data.scan import SCAN_VERSION
from gracetune.telemetry.events import SCHEMA_VERSION
from unit.docs.targets import ROOT, text_of

SCRIPT = ROOT / "scripts" / "reference_pages.py"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HINT = "run: python scripts/reference_pages.py"


def test_the_page_of_options_is_up_to_date(pages: ModuleType) -> None:
    assert text_of("options.md") == pages.options_page(), HINT


def test_the_page_of_commands_is_up_to_date(pages: ModuleType) -> None:
    assert text_of("commands.md") == pages.commands_page(), HINT


def test_the_versions_in_the_changelog_are_those_that_are_written() -> None:
    written = {
        "native config (`gracetune:`)": native.VERSION,
        "checkpoint manifest, state parts": manifest.VERSION,
        "event log (`v`)": SCHEMA_VERSION,
        "position in the data, in a checkpoint": STATE_VERSION,
        "cache folder": folders.VERSION,
        "results of a folder's scan": SCAN_VERSION,
    }
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| [^|]+ \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert {name: int(version) for name, version in rows if name in written} == written
