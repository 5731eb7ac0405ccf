"""Every page: accessible in both themes, whole on a phone, usable with the keyboard."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser.axe import AXE, serious_problems
from browser.conftest import OpenPage, run_id, settle
from browser.full_pages import LONG_NAME, STEPS, write_runs
from browser.studio_process import Studio, studio
from unit.studio.logs import locked, step, write_run

PAGES = (
    "#/runs",
    "#/compare",
    "#/compare?ids=RUN,OTHER",
    "#/run/RUN",
    "#/run/RUN/memory",
    "#/new",
    "#/queue",
    "#/machine",
)
"""The page of a run's data has tests of its own: it needs a real run."""


@pytest.fixture(scope="module", autouse=True)
def live(root: Path) -> Iterator[Path]:
    """A run that fills every part of its pages, held as active; and finished and failed ones."""
    run = write_runs(root / "runs")
    with locked(run):
        yield run


def go(page: Page, served: Studio, route: str) -> None:
    page.goto(served.address + route.replace("RUN", run_id(page, "live")).replace("OTHER", run_id(page, LONG_NAME)))
    page.wait_for_selector("main h1, main [role=alert]")
    settle(1.2)


@pytest.mark.parametrize("route", PAGES)
def test_axe_finds_no_serious_problem(route: str, open_page: OpenPage, control: Studio) -> None:
    page = open_page(control)
    go(page, control, route)
    assert serious_problems(page) == []


@pytest.mark.parametrize("width", [390, 1280, 3840])
@pytest.mark.parametrize("route", PAGES)
def test_nothing_is_wider_than_the_screen(route: str, width: int, open_page: OpenPage, control: Studio) -> None:
    page = open_page(control, viewport={"width": width, "height": 900})
    go(page, control, route)
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert page.locator(".empty.error").all_text_contents() == []


def test_the_list_of_runs_is_used_with_the_keyboard(open_page: OpenPage, control: Studio) -> None:
    page = open_page(control)
    page.keyboard.press("/")
    expect(page.get_by_label("Search runs")).to_be_focused()
    page.keyboard.type("no such run")
    expect(page.get_by_text("No run matches")).to_be_visible()
    page.get_by_label("Search runs").fill("live")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_label("Compare live")).to_be_checked()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"#/run/[0-9a-f]{12}$"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name="Compare", exact=True)).to_be_visible()


def test_a_comparison_follows_its_runs(open_page: OpenPage, control: Studio, live: Path) -> None:
    page = open_page(control)
    go(page, control, "#/compare?ids=RUN,OTHER")
    plot = page.get_by_role("img", name="Curves.")
    before = plot.get_attribute("aria-label")
    write_run(live, [step(STEPS + 1, stage="high_noise"), step(STEPS + 2, stage="low_noise")], begin=time.time())
    rows = page.get_by_role("region", name="Compared runs").locator("tbody tr")
    expect(rows.first).to_contain_text(f"{STEPS + 2} / 2,000")
    expect(rows).to_have_count(2)
    assert plot.get_attribute("aria-label") != before


def test_a_chart_is_read_with_the_keyboard(open_page: OpenPage, control: Studio) -> None:
    page = open_page(control)
    go(page, control, "#/run/RUN")
    page.wait_for_selector(".uplot canvas")
    chart = page.locator("figure.chart").first
    chart.locator(".plot").focus()
    page.keyboard.press("Home")
    expect(chart.locator(".legend-x")).to_have_text("step 1")
    page.keyboard.press("ArrowRight")
    expect(chart.locator(".legend-x")).not_to_have_text("step 1")


def test_the_theme_is_kept(open_page: OpenPage, control: Studio) -> None:
    page = open_page(control, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    for name in ("Theme: as the system", "Theme: light"):
        page.get_by_role("button", name=name).click()
    assert page.evaluate(background) != light
    page.reload()
    page.wait_for_selector("main h1")
    assert page.evaluate(background) != light


def test_a_studio_without_control_says_so(open_page: OpenPage, root: Path) -> None:
    with studio(root / "runs") as served:
        page = open_page(served)
        expect(page.get_by_text("read only")).to_be_visible()
        page.goto(f"{served.address}#/run/{run_id(page, 'live')}")
        button = page.get_by_role("button", name="Stop. Not now:")
        expect(button).to_have_attribute("aria-disabled", "true")


def test_a_browser_without_the_link_sees_nothing(browser: Any, control: Studio) -> None:
    context = browser.new_context()
    page = context.new_page()
    assert page.goto(control.address).status == 401
    assert page.get_by_text("link").count() > 0
    context.close()


def test_the_connection_is_shown(open_page: OpenPage, control: Studio) -> None:
    page = open_page(control)
    go(page, control, "#/run/RUN")
    expect(page.locator(".connection")).to_have_class(re.compile("live"))


def test_vendored_files_are_unchanged() -> None:
    static = Path(__file__).parents[2] / "src" / "gracetune" / "studio" / "static" / "vendor" / "uplot"
    for folder in (AXE.parent, static):
        listed = re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", (folder / "README.md").read_text())
        assert len(listed) >= 3
        for name, digest in listed:
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
