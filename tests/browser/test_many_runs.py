"""A thousand runs in the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenPage
from browser.studio_process import studio
from unit.studio.logs import BEGAN_S, ended, started, step, write_run

RUNS = 1000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many") / "runs"
    for number in range(RUNS):
        events = [started(run=f"run-{number:04}"), step(1), step(2), ended(2)]
        write_run(root / f"run-{number:04}", events, begin=BEGAN_S + number)
    return root


def test_rows_are_made_as_they_come_into_view(many: Path, open_page: OpenPage) -> None:
    with studio(many) as served:
        page = open_page(served)
        expect(page.get_by_text("1,000 runs")).to_be_visible()
        rows = page.locator("tbody tr")
        first = rows.count()
        assert 20 <= first < RUNS
        for _ in range(3):
            page.mouse.move(640, 500)
            page.mouse.wheel(0, 20_000)
            page.wait_for_timeout(400)
        assert rows.count() > first
        # A run that has no row yet is found.
        page.get_by_label("Search runs").fill("run-0003")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("run-0003")
