"""The machine's page: what the doctor finds, and baselines with their comparisons."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import expect

from browser.axe import serious_problems
from browser.conftest import OpenPage
from browser.studio_process import Studio, studio
from gracetune.baselines.baseline import FILE
from unit.baselines.sample_baselines import baseline


def write_baseline(folder: Path, step_ms: float, date: str) -> None:
    folder.mkdir(parents=True)
    (folder / FILE).write_text(baseline((step_ms,) * 40, date=date).to_json())


def test_checks_and_baselines_are_shown(open_page: OpenPage, control: Studio, root: Path) -> None:
    write_baseline(root / "runs" / "baselines" / "may", 100.0, "2026-05-01T00:00:00+00:00")
    write_baseline(root / "runs" / "baselines" / "june", 150.0, "2026-06-01T00:00:00+00:00")
    page = open_page(control)
    page.goto(f"{control.address}#/machine")
    checks = page.get_by_role("region", name="Checks")
    expect(checks.get_by_role("row", name="Host memory")).to_contain_text("GiB", timeout=60_000)
    report = json.loads(page.evaluate("fetch('api/machine').then((answer) => answer.text())"))
    assert checks.locator("tbody tr").count() == len(report["checks"])
    for check in report["checks"]:
        row = checks.locator(f"tr[data-check={check['name']}]")
        expect(row).to_contain_text(check["finding"][:60])
        if check["remedy"]:
            expect(row).to_contain_text(check["remedy"])
    assert page.get_by_role("region", name="Table of baselines", exact=True).locator("tbody tr").count() == 2
    compared = page.get_by_role("region", name="Table of baselines/may → baselines/june")
    expect(compared.get_by_role("row", name="step time")).to_contain_text("regression")
    page.get_by_role("button", name="Examine again").click()
    expect(page.get_by_text("Examined just now")).to_be_visible(timeout=60_000)
    assert serious_problems(page) == []
    for width in (390, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert serious_problems(page) == []


def test_the_machine_is_not_examined_again_without_control(open_page: OpenPage, root: Path) -> None:
    with studio(root / "runs") as served:
        page = open_page(served)
        page.goto(f"{served.address}#/machine")
        expect(page.get_by_role("button", name="Examine again")).to_be_disabled(timeout=60_000)
