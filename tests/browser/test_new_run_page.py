"""A new run in a browser: from a folder or a file to a config that is checked, planned, saved, started and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect

from browser.axe import serious_problems
from browser.conftest import OpenPage
from browser.studio_process import Studio, events, studio, wait_for
from runs.made_runs import TinyModel, images
from runs.test_dialects import sdxl_job

MADE = """([files]) => {
  const data = new DataTransfer();
  for (const [name, text] of files) data.items.add(new File([text], name));
  return data;
}"""
NATIVE = """\
gracetune: 1
name: owl  # the bird
output_dir: runs/owl
model: {family: sdxl}
datasets:
  - id: owls
    path: PICTURES
training: {max_steps: 100}
"""


def drop(page: Page, *files: tuple[str, str]) -> None:
    """Drop files with these names and texts on the page."""
    data = page.evaluate_handle(MADE, [files])
    page.dispatch_event(".page-new", "dragover", {"dataTransfer": data})
    page.dispatch_event(".page-new", "drop", {"dataTransfer": data})


@pytest.fixture
def page(open_page: OpenPage, control: Studio) -> Page:
    opened = open_page(control, viewport={"width": 1700, "height": 900})
    opened.goto(f"{control.address}#/new")
    expect(opened.get_by_role("button", name="Propose a config")).to_be_visible()
    return opened


@pytest.fixture
def owl(page: Page, tmp_path: Path) -> Page:
    """The page with a config in it."""
    drop(page, ("owl.yaml", NATIVE.replace("PICTURES", str(images(tmp_path / "pictures")))))
    expect(page.get_by_text("No problems found").first).to_be_visible()
    return page


def text_of(page: Page) -> str:
    return page.get_by_label("Text of the config").input_value()


def option(page: Page, path: str) -> Any:
    return page.locator(f'.option[data-path="{path}"]').locator("input, select, textarea")


@pytest.mark.timeout(300)
def test_a_folder_becomes_a_config_with_a_plan(page: Page, tmp_path: Path) -> None:
    page.get_by_label("Folder of images").fill(str(images(tmp_path / "owls", 12)))
    page.get_by_label("style").check()
    page.get_by_label("Trigger word").fill("owlish")
    page.get_by_label("Steps").fill("321")
    page.get_by_role("button", name="Propose a config").click()
    expect(option(page, "training.max_steps")).to_have_value("321", timeout=120_000)
    expect(page.get_by_text("No problems found").first).to_be_visible()
    expect(page.locator(".plan-headline")).to_contain_text("GiB", timeout=60_000)
    assert "owlish" in text_of(page)
    assert page.locator(".plan-bar").count() >= 1


def test_a_folder_that_is_not_there_is_explained(page: Page) -> None:
    page.get_by_label("Folder of images").fill("/no/such/folder")
    page.get_by_role("button", name="Propose a config").click()
    alert = page.locator("#start-problem")
    expect(alert).to_contain_text("/no/such/folder", timeout=60_000)
    expect(alert).to_contain_text("expected")


def test_form_and_text_follow_each_other(owl: Page) -> None:
    option(owl, "training.max_steps").fill("250")
    expect(owl.get_by_label("Text of the config")).to_have_value(
        NATIVE.replace("PICTURES", option(owl, "datasets[0].path").input_value()).replace("100", "250")
    )
    text = owl.get_by_label("Text of the config")
    text.fill(text_of(owl).replace("max_steps: 250", "max_steps: 777"))
    expect(option(owl, "training.max_steps")).to_have_value("777")
    option(owl, "adapter.kind").select_option("lokr")
    wait_for(lambda: "lokr" in text_of(owl), "the text", 20)
    assert "# the bird" in text_of(owl)
    owl.get_by_role("button", name="Reset kind to its default").click()
    wait_for(lambda: "lokr" not in text_of(owl), "the text", 20)


def test_problems_are_shown_at_their_fields_and_in_a_list(owl: Page) -> None:
    field = option(owl, "training.max_steps")
    field.fill("many")
    expect(field).to_have_attribute("aria-invalid", "true")
    described = (field.get_attribute("aria-describedby") or "").split()[-1]
    expect(owl.locator(f"#{described}")).to_contain_text("whole number")
    expect(owl.get_by_role("status").filter(has_text="1 problem").first).to_be_visible()
    assert serious_problems(owl) == []
    owl.get_by_label("File name").focus()
    owl.get_by_role("button", name="Go to training.max_steps").click()
    expect(field).to_be_focused()
    field.fill("100")
    expect(owl.get_by_text("No problems found").first).to_be_visible()
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_text_that_is_no_config_is_explained(owl: Page) -> None:
    owl.get_by_label("Text of the config").fill("gracetune: 1\nname: [")
    expect(owl.locator(".problem-row").first).to_be_visible()
    owl.get_by_label("Text of the config").fill("<script>document.title = 'hostile'</script>")
    expect(owl.locator(".problem-row").first).to_be_visible()
    assert "hostile" not in owl.title()


def test_options_are_searched_and_added(owl: Page) -> None:
    owl.keyboard.press("Escape")
    owl.locator("h1").focus()
    owl.keyboard.press("/")
    expect(owl.get_by_label("Search the options")).to_be_focused()
    owl.keyboard.type("ema decay")
    expect(option(owl, "training.ema.decay")).to_be_visible()
    expect(option(owl, "cache.cache_dir")).to_be_hidden()
    owl.get_by_label("Search the options").fill("")
    owl.locator("summary", has_text="Validation").click()
    owl.get_by_role("button", name="Add a prompt").click()
    expect(option(owl, "validation.prompts[0].prompt")).to_have_value("describe a sample")
    wait_for(lambda: "describe a sample" in text_of(owl), "the text", 20)
    owl.get_by_role("button", name="Add a prompt").click()
    expect(option(owl, "validation.prompts[1].prompt")).to_be_visible()
    owl.get_by_role("button", name="Remove prompt 1").click()
    expect(option(owl, "validation.prompts[1].prompt")).to_have_count(0)


@pytest.mark.timeout(400)
def test_a_dropped_ai_toolkit_file_is_trained(page: Page, control: Studio, tiny_model: TinyModel, root: Path) -> None:
    (root / "job").mkdir()
    job = sdxl_job(tiny_model, root / "job", training_folder=str(root / "runs"))
    drop(page, ("cats.yaml", job.read_text()))
    expect(page.get_by_text("A file of ai-toolkit")).to_be_visible()
    expect(page.get_by_text("No problems found").first).to_be_visible()
    expect(page.locator(".plan-headline")).to_contain_text("GiB", timeout=60_000)
    expect(option(page, "adapter.rank")).to_have_value("4")
    page.get_by_role("button", name="Save and start").click()
    if page.get_by_role("dialog").count():
        page.get_by_role("button", name="Start all the same").click()
    row = page.get_by_role("listitem", name="cats")
    expect(row).to_contain_text("done", timeout=240_000)
    assert (root / "runs" / "configs" / "cats.yaml").read_text() == job.read_text()
    assert [line["outcome"] for line in events(root / "runs" / "cats") if line["kind"] == "RunEnded"] == ["finished"]
    assert list((root / "runs" / "cats").glob("*.safetensors"))
    row.get_by_role("button", name="Remove cats from the list").click()
    expect(row).to_have_count(0)


def test_a_peers_file_is_translated_by_the_first_change(page: Page, tiny_model: TinyModel, tmp_path: Path) -> None:
    drop(page, ("cats.yaml", sdxl_job(tiny_model, tmp_path).read_text()))
    expect(page.get_by_text("A file of ai-toolkit")).to_be_visible()
    option(page, "adapter.rank").fill("8")
    wait_for(lambda: "gracetune: 1" in text_of(page), "the text", 20)
    wait_for(lambda: "rank: 8" in text_of(page), "the text", 20)
    expect(page.get_by_text("A file of ai-toolkit")).to_have_count(0)
    expect(page.get_by_text("No problems found").first).to_be_visible()


def test_a_simpletuner_config_is_dropped_with_its_datasets(page: Page, tiny_model: TinyModel, tmp_path: Path) -> None:
    datasets = [
        {"id": "pictures", "type": "local", "instance_data_dir": str(images(tmp_path / "pictures")), "resolution": 64,
         "resolution_type": "pixel", "caption_strategy": "textfile", "cache_dir_vae": str(tmp_path / "vae")},
        {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True,
         "cache_dir": str(tmp_path / "text")},
    ]  # fmt: skip
    config = {
        "--model_family": "sdxl", "--model_type": "lora", "--pretrained_model_name_or_path": "stabilityai/sdxl",
        "--data_backend_config": "config/multidatabackend.json", "--output_dir": str(tmp_path / "out"),
        "--max_train_steps": 50, "--learning_rate": 1e-4, "--lora_rank": 8, "--optimizer": "adamw_bf16",
    }  # fmt: skip
    drop(page, ("multidatabackend.json", json.dumps(datasets)), ("config.json", json.dumps(config)))
    wait_for(lambda: "gracetune: 1" in text_of(page), "the text", 20)
    values = yaml.safe_load(text_of(page))
    assert values["datasets"][0]["id"] == "pictures"
    expect(option(page, "adapter.rank")).to_have_value("8")


def test_a_file_is_never_overwritten(owl: Page, root: Path) -> None:
    owl.get_by_role("button", name="Save", exact=True).click()
    expect(owl.get_by_text("Saved as")).to_be_visible()
    first = (root / "runs" / "configs" / "owl.yaml").read_text()
    option(owl, "training.max_steps").fill("5")
    expect(owl.get_by_text("No problems found").first).to_be_visible()
    owl.get_by_role("button", name="Save", exact=True).click()
    expect(owl.get_by_text("owl-2.yaml")).to_be_visible()
    assert (root / "runs" / "configs" / "owl.yaml").read_text() == first


def test_the_draft_outlives_the_page(owl: Page, control: Studio) -> None:
    text = text_of(owl)
    owl.goto(f"{control.address}#/queue")
    owl.goto(f"{control.address}#/new")
    expect(owl.get_by_label("Text of the config")).to_have_value(text)
    owl.get_by_role("button", name="Start over").click()
    owl.get_by_role("button", name="Discard").click()
    expect(owl.get_by_label("Folder of images")).to_be_focused()


@pytest.mark.parametrize("width", [390, 1280, 3840])
def test_the_editor_is_accessible_and_fits(width: int, open_page: OpenPage, control: Studio, tmp_path: Path) -> None:
    page = open_page(control, viewport={"width": width, "height": 850})
    page.goto(f"{control.address}#/new")
    expect(page.get_by_role("button", name="Propose a config")).to_be_visible()
    drop(page, ("owl.yaml", NATIVE.replace("PICTURES", str(images(tmp_path / "pictures")))))
    expect(page.locator(".plan-headline")).to_contain_text("GiB", timeout=60_000)
    for view in ("Form", "Form and YAML", "YAML"):
        page.get_by_role("button", name=view, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    page.get_by_role("button", name="Form and YAML", exact=True).click()
    assert serious_problems(page) == []
    for summary in page.locator(".option-group > summary").all() if width == 390 else []:
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_a_read_only_studio_makes_no_configs(open_page: OpenPage, root: Path) -> None:
    with studio(root / "runs") as served:
        page = open_page(served)
        page.goto(f"{served.address}#/new")
        expect(page.get_by_text("This studio is read only, so it makes no configs")).to_be_visible()
        expect(page.get_by_role("button", name="Propose a config")).to_be_disabled()
