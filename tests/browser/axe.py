"""axe-core in a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

AXE = Path(__file__).parent / "vendor" / "axe" / "axe.min.js"


def serious_problems(page: Page) -> list[str]:
    """The serious accessibility problems that axe-core finds in the page as it is now."""
    page.evaluate(AXE.read_text())
    found: list[dict[str, Any]] = page.evaluate("axe.run(document)")["violations"]
    return [
        f"{one['id']}: {node['html'][:160]} {node['failureSummary']}"
        for one in found if one["impact"] in ("serious", "critical") for node in one["nodes"]
    ]  # fmt: skip
