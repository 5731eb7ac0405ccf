"""The data page of a run: captions that are changed in place, conflicts, undo, pages, dropped files, judged losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from browser.axe import serious_problems
from browser.conftest import OpenPage, run_id, settle
from browser.studio_process import Studio, events, process, studio, wait_for
from runs.launched import write_config
from runs.made_runs import TinyModel, config_for, images

ITEMS = 30
LISTING_MS = 120_000
"""The first look at the data of a run starts a process that imports torch."""
SAMPLES = {"at_start": True, "every_steps": None, "steps": 1, "width": 64, "height": 64}


def train(file: Path, folder: Path) -> None:
    with process("train", str(file), output=folder / f"{file.stem}.txt") as started:
        assert started.wait(240) == 0, (folder / f"{file.stem}.txt").read_text()


@pytest.fixture(scope="module")
def finished(root: Path, tiny_model: TinyModel) -> Path:
    """The folder of the images of a run that has ended and was judged. One of them is too small to be used."""
    folder = images(root / "pictures", ITEMS)
    Image.new("RGB", (16, 16)).save(folder / "small.png")
    data = [{"id": "pictures", "path": str(folder), "resolution": 64.0, "minimum_size": 32.0}]
    config = config_for(
        "sdxl", tiny_model, root / "files", name="ended", output_dir=str(root / "runs" / "ended"), datasets=data,
        training={"max_steps": 2}, validation=SAMPLES,
    )  # fmt: skip
    train(write_config(config, root / "ended.yaml"), root)
    with process("data", "judge", config.output_dir, "--most", "4", output=root / "judge.txt") as judged:
        assert judged.wait(240) == 0, (root / "judge.txt").read_text()
    return folder


@pytest.fixture
def page(open_page: OpenPage, control: Studio, finished: Path) -> Page:
    opened = open_page(control)
    opened.goto(f"{control.address}#/run/{run_id(opened, 'ended')}/data")
    opened.wait_for_selector(".item", timeout=LISTING_MS)
    return opened


def caption_of(page: Page, file: str) -> Locator:
    return page.get_by_label(f"Caption of {file}")


def test_a_caption_is_saved_and_the_change_is_undone(page: Page, finished: Path) -> None:
    field = caption_of(page, "00.png")
    expect(field).to_have_value("picture number 0")
    field.fill("a cat on a wall")
    field.press("Control+Enter")
    expect(page.locator(".item", has=field).get_by_text("saved", exact=True)).to_be_visible()
    assert (finished / "00.txt").read_text() == "a cat on a wall"
    page.reload()
    undo = page.get_by_role("button", name="Undo the change of 00.png")
    undo.click()
    expect(caption_of(page, "00.png")).to_have_value("picture number 0")
    assert (finished / "00.txt").read_text() == "picture number 0"
    expect(undo).to_have_count(0)


def test_an_edit_is_discarded(page: Page, finished: Path) -> None:
    field = caption_of(page, "01.png")
    field.fill("a mistake")
    field.press("Escape")
    expect(field).to_have_value("picture number 1")
    assert (finished / "01.txt").read_text() == "picture number 1"


def test_a_caption_that_changed_meanwhile_is_not_overwritten(page: Page, finished: Path) -> None:
    (finished / "02.txt").write_text("of another editor")
    field = caption_of(page, "02.png")
    item = page.locator(".item", has=field)
    field.fill("mine")
    item.get_by_role("button", name="Save", exact=True).click()
    expect(item.get_by_role("alert")).to_contain_text("of another editor")
    assert (finished / "02.txt").read_text() == "of another editor"
    expect(field).to_have_value("mine")
    assert serious_problems(page) == []
    item.get_by_role("button", name="Save mine over it").click()
    expect(item.get_by_text("saved", exact=True)).to_be_visible()
    assert (finished / "02.txt").read_text() == "mine"
    (finished / "02.txt").write_text("of another editor")
    field.fill("mine again")
    item.get_by_role("button", name="Save", exact=True).click()
    item.get_by_role("button", name="Use the file's").click()
    expect(field).to_have_value("of another editor")


@pytest.mark.timeout(400)
def test_the_next_run_trains_on_the_new_caption(
    page: Page, finished: Path, root: Path, control: Studio, tiny_model: TinyModel
) -> None:
    field = caption_of(page, "00.png")
    field.fill("a lighthouse in the fog")
    field.press("Control+Enter")
    expect(page.locator(".item", has=field).get_by_text("saved", exact=True)).to_be_visible()
    data = [{"id": "pictures", "path": str(finished), "resolution": 64.0}]
    config = config_for(
        "sdxl", tiny_model, root / "files", name="next", output_dir=str(root / "runs" / "next"), datasets=data,
        training={"max_steps": 2}, validation=SAMPLES,
    )  # fmt: skip
    file = write_config(config, root / "next.yaml")
    values = yaml.safe_load(file.read_text())
    values["validation"].pop("prompts", None)  # without this key, captions of the data are the prompts of samples
    file.write_text(yaml.safe_dump(values))
    page.goto(f"{control.address}#/queue")
    page.get_by_label("Config file").fill(str(file))
    page.get_by_role("button", name="Add to the queue").click()
    job = page.get_by_role("listitem", name="next")
    expect(job).to_contain_text("done", timeout=240_000)
    log = (root / "runs" / "next" / "logs" / "events.jsonl").read_text()
    assert "a lighthouse in the fog" in log
    assert any(line["kind"] == "RunEnded" for line in events(root / "runs" / "next"))
    job.get_by_role("link", name="next").click()
    expect(page.get_by_role("heading", name="next")).to_be_visible()


def test_the_page_is_accessible_and_fits(page: Page) -> None:
    assert serious_problems(page) == []
    for width in (390, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_pages_are_turned_without_moving_anything(page: Page) -> None:
    expect(page.get_by_text(f"1–24 of {ITEMS}")).to_be_visible()
    page.evaluate("window.shifts = 0")
    page.keyboard.press("n")
    expect(page.get_by_text(f"25–{ITEMS} of {ITEMS}")).to_be_visible()
    page.keyboard.press("p")
    expect(page.get_by_text(f"1–24 of {ITEMS}")).to_be_visible()
    settle(0.5)
    assert page.evaluate("window.shifts") < 0.005
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("e")
    expect(caption_of(page, "01.png")).to_be_focused()


def test_dropped_files_have_reasons_and_buckets_are_counted(page: Page) -> None:
    dropped = page.get_by_role("region", name="Files and reasons")
    expect(dropped).to_contain_text("small.png")
    expect(dropped.locator("summary")).not_to_be_empty()
    row = page.get_by_role("region", name="Table of buckets").locator("tbody tr").first
    expect(row).to_contain_text("64x64")
    expect(row).to_contain_text(str(ITEMS))


def test_items_are_sorted_by_their_loss(page: Page) -> None:
    page.get_by_label("Sorted by").select_option("loss, highest first")
    first = page.locator(".item-loss").first
    expect(first).to_contain_text("→")

    def after() -> list[float]:
        texts = page.locator(".item-loss", has_text="→").all_inner_texts()
        return [float(text.split("→")[1].split(",")[0]) for text in texts]

    wait_for(lambda: len(after()) == 4, "the judged items", 10)
    assert after() == sorted(after(), reverse=True)


def test_captions_cannot_be_changed_without_control(open_page: OpenPage, root: Path, finished: Path) -> None:
    with studio(root / "runs") as served:
        page = open_page(served)
        page.goto(f"{served.address}#/run/{run_id(page, 'ended')}/data")
        expect(page.get_by_text("To change captions: gracetune studio --control")).to_be_visible(timeout=LISTING_MS)
        assert caption_of(page, "00.png").get_attribute("readonly") is not None
