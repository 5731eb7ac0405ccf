"""axe-core in a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Page

AXE = Path(__file__).parent / "vendor" / "axe" / "axe.min.js"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def serious_problems(page: Page) -> list[str]:
    """The serious accessibility problems that axe-core finds in the page as it is now, in both themes."""
    # Contrast is not measured in the middle of a transition from one theme to the other.
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(AXE.read_text())
    found = list[str]()
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        violations: list[dict[str, Any]] = page.evaluate("axe.run(document)")["violations"]
        found += [
            f"{theme}: {one['id']}: {node['html'][:160]} {node['failureSummary']}"
            for one in violations if one["impact"] in ("serious", "critical") for node in one["nodes"]
        ]  # fmt: skip
    return found
