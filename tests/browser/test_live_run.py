"""A run that trains, seen and steered in a browser."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from browser.conftest import HOSTILE, OpenPage, run_id, settle
from browser.page_scripts import SHOWN
from browser.studio_process import Studio, events, wait_for


def test_new_points_appear_within_two_seconds(open_page: OpenPage, control: Studio, training: Path) -> None:
    page = open_page(control)
    page.goto(f"{control.address}#/run/{run_id(page, 'live')}")
    plot = page.get_by_role("img", name="Loss.")
    expect(plot).to_be_visible()
    before = plot.get_attribute("aria-label")
    page.evaluate(SHOWN)
    settle(6)
    shown = page.evaluate("window.shown")
    written = {line["step"]: line["time_s"] for line in events(training) if line["kind"] == "StepDone"}
    # A number on the page is late by the age of the first step that it does not include yet.
    delays = sorted(moment - written[step] for moment, step in shown if step in written)
    assert len(delays) >= 3
    assert delays[int(0.9 * len(delays))] < 2
    assert plot.get_attribute("aria-label") != before


def test_nothing_moves_while_points_arrive(open_page: OpenPage, control: Studio, training: Path) -> None:
    page = open_page(control)
    page.goto(f"{control.address}#/run/{run_id(page, 'live')}")
    page.wait_for_selector(".uplot canvas")
    settle(1)
    for route in (page.url, page.url + "/memory", f"{control.address}#/runs"):
        page.goto(route)
        page.wait_for_selector("main h1")
        settle(1.5)
        page.evaluate("window.shifts = 0")
        settle(4)
        assert page.evaluate("window.shifts") < 0.005, route


def test_a_sample_that_is_requested_appears(open_page: OpenPage, control: Studio, training: Path) -> None:
    page = open_page(control)
    page.goto(f"{control.address}#/run/{run_id(page, 'live')}")
    page.get_by_role("button", name="Sample now").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Sample now").click()
    image = page.locator(".sample-box img").first
    expect(image).to_be_visible(timeout=60_000)
    # Not `wait_for_function`: it evaluates text in the page, which the content security policy forbids.
    wait_for(lambda: image.evaluate("(one) => one.naturalWidth") == 64, "the image")
    requested = [line for line in events(training) if line["kind"] == "ValidationDone"]
    assert requested[-1]["requested"]
    # The other prompt is markup, and is shown as text.
    assert page.locator(".sample-prompt").nth(1).text_content() == HOSTILE
    assert "hostile" not in page.title()
    page.get_by_role("button", name="All steps").click()
    assert HOSTILE in (page.locator(".sample-table tbody th").nth(1).text_content() or "")
    assert page.locator("main script, main img[onerror]").count() == 0


def test_two_steps_are_compared_with_a_wipe(open_page: OpenPage, control: Studio, training: Path) -> None:
    page = open_page(control)
    page.goto(f"{control.address}#/run/{run_id(page, 'live')}")
    page.get_by_role("button", name="Before and after").click()
    border = page.get_by_role("slider", name="Border between").first
    border.focus()
    border.press("Home")
    assert page.locator(".wipe").first.evaluate("(box) => box.style.getPropertyValue('--at')") == "0%"


def test_a_checkpoint_that_is_requested_is_written(open_page: OpenPage, control: Studio, training: Path) -> None:
    page = open_page(control)
    page.goto(f"{control.address}#/run/{run_id(page, 'live')}")
    page.get_by_role("button", name="Save now").click()
    page.get_by_role("dialog").get_by_role("button", name="Save now").click()
    found = wait_for(lambda: [line for line in events(training) if line["kind"] == "CheckpointWritten"], "a checkpoint")
    assert (training / found[-1]["path"]).is_dir()
    expect(page.get_by_role("region", name="Warnings and events").first).to_contain_text(
        "checkpoint written, requested by the studio"
    )


def test_a_question_can_be_declined(open_page: OpenPage, control: Studio, training: Path) -> None:
    page = open_page(control)
    page.goto(f"{control.address}#/run/{run_id(page, 'live')}")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert not (training / "stop-now").exists()
