"""The queue in a browser: jobs are added, reordered, cancelled and removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from browser.axe import serious_problems
from browser.conftest import LONG, OpenPage, settle, tiny_config
from browser.studio_process import Studio, events, steps_done, studio, wait_for
from runs.launched import write_config
from runs.made_runs import TinyModel

JOBS = ("first", "second", "third", "fourth")


@pytest.fixture(scope="module")
def configs(root: Path, tiny_model: TinyModel) -> dict[str, Path]:
    return {name: write_config(tiny_config(tiny_model, root, name, LONG), root / f"{name}.yaml") for name in JOBS}


@pytest.fixture
def page(open_page: OpenPage, control: Studio) -> Page:
    opened = open_page(control)
    opened.goto(f"{control.address}#/queue")
    expect(opened.get_by_label("Config file")).to_be_visible()
    return opened


def job(page: Page, name: str) -> Locator:
    return page.get_by_role("listitem", name=f"{name},")


def order(page: Page) -> list[str]:
    """The waiting jobs as the server has them."""
    queue: dict[str, Any] = page.evaluate("fetch('api/queue').then((answer) => answer.json())")
    return [one["name"] for one in queue["jobs"] if one["state"] == "waiting"]


@pytest.mark.timeout(400)
def test_jobs_are_added_reordered_cancelled_and_removed(page: Page, configs: dict[str, Path], root: Path) -> None:
    expect(page.get_by_text("The queue is empty")).to_be_visible()
    for file in configs.values():
        page.get_by_label("Config file").fill(str(file))
        page.keyboard.press("Enter")
        expect(page.get_by_label("Config file")).to_have_value("")
    expect(job(page, "first")).to_contain_text("running", timeout=60_000)
    assert order(page) == ["second", "third", "fourth"]

    page.get_by_role("button", name="Move fourth up").click()
    wait_for(lambda: order(page) == ["second", "fourth", "third"], "the new order", 10)
    expect(page.get_by_role("button", name="Move fourth up")).to_be_focused()
    job(page, "third").focus()
    for _ in range(2):
        before = order(page)
        page.keyboard.press("Alt+ArrowUp")
        wait_for(lambda before=before: order(page) != before, "the next order", 10)
        expect(job(page, "third")).to_be_focused()
    assert order(page) == ["third", "second", "fourth"]
    page.keyboard.press("Alt+ArrowUp")
    settle(0.5)
    assert order(page) == ["third", "second", "fourth"]
    labels = page.locator(".job").evaluate_all("(all) => all.map((one) => one.ariaLabel)")
    assert [label.split(",")[0] for label in labels] == ["first", "third", "second", "fourth"]
    assert serious_problems(page) == []

    page.get_by_role("button", name="Cancel fourth").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(job(page, "fourth")).to_contain_text("cancelled")
    page.get_by_role("button", name="Remove fourth from the list").click()
    expect(job(page, "fourth")).to_have_count(0)
    for name in ("third", "second"):
        page.get_by_role("button", name=f"Cancel {name}").click()
        page.get_by_role("button", name="Cancel the job").click()
        expect(job(page, name)).to_contain_text("cancelled")

    wait_for(lambda: steps_done(root / "runs" / "first") > 2, "the first steps", 120)
    expect(job(page, "first").get_by_role("link", name="first")).to_be_visible()
    page.get_by_role("button", name="Cancel first").click()
    page.get_by_role("button", name="Stop the run").click()
    expect(job(page, "first")).to_contain_text("its state is saved", timeout=120_000)
    assert [line["kind"] for line in events(root / "runs" / "first")].count("CheckpointWritten") >= 1
    job(page, "first").locator("summary").click()
    expect(page.get_by_role("region", name="Log of first")).not_to_be_empty()
    assert serious_problems(page) == []


def test_a_config_that_is_not_there_is_explained(page: Page) -> None:
    page.get_by_label("Config file").fill("no-such-config.yaml")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("expected")
    expect(page.get_by_label("Config file")).to_have_value("no-such-config.yaml")


def test_nothing_is_changed_without_control(open_page: OpenPage, root: Path, control: Studio) -> None:
    with studio(root / "runs") as served:
        page = open_page(served)
        page.goto(f"{served.address}#/queue")
        expect(page.get_by_text("To act on the queue: gracetune studio --control")).to_be_visible()
        expect(page.get_by_role("button", name="Add to the queue")).to_be_disabled()
        for button in page.locator(".job-actions button:visible").all():
            expect(button).to_be_disabled()
