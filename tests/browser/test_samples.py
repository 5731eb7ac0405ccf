"""Samples of every medium: images with a slider and a wipe, videos and sounds that play."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page, expect

from browser.axe import serious_problems
from browser.conftest import OpenPage
from browser.studio_process import studio, wait_for
from gracetune.models.spec import Sampled
from gracetune.telemetry.events import SampleFile, ValidationDone
from gracetune.train.sample_files import write_sample
from unit.studio.logs import started, step, write_run

STEPS = (10, 20, 30)


def frame(shade: int) -> Image.Image:
    return Image.fromarray(np.full((64, 64, 3), shade, np.uint8))


def samples_of(run: Path, number: int) -> tuple[SampleFile, ...]:
    """An image, a clip of two seconds and a sound of two seconds, as a run writes them."""
    wave = torch.sin(torch.linspace(0, 2000, 2 * 8000)).repeat(2, 1)
    made = (
        Sampled((frame(80 * number),)), Sampled(tuple(frame(8 * one) for one in range(32)), fps=16.0),
        Sampled(audio=wave, sample_rate=8000),
    )  # fmt: skip
    files = []
    for index, sampled in enumerate(made):
        path, kind = write_sample(run / "samples" / f"step_{number}_{index}", sampled)
        files.append(SampleFile(path=str(path.relative_to(run)), kind=kind, prompt=f"a {kind}", seed=index))
    return tuple(files)


@pytest.fixture
def page(tmp_path: Path, open_page: OpenPage) -> Iterator[Page]:
    run = tmp_path / "runs" / "cats"
    write_run(run, [started(), step(1)])
    write_run(run, [ValidationDone(step=number, files=samples_of(run, at)) for at, number in enumerate(STEPS)])
    with studio(tmp_path / "runs") as served:
        opened = open_page(served)
        opened.get_by_role("link", name="cats").click()
        expect(opened.locator(".sample-box")).to_have_count(3)
        yield opened


def test_videos_and_sounds_play(page: Page) -> None:
    for kind in ("video", "audio"):
        player = page.locator(f".sample-box {kind}")
        player.evaluate("(one) => { one.muted = true; return one.play(); }")
        wait_for(lambda player=player: player.evaluate("(one) => one.currentTime") > 0.3, f"the {kind}", 20)
        assert 1.9 < player.evaluate("(one) => one.duration") < 2.1
        # Only the wanted part of the file is sent.
        player.evaluate("(one) => { one.pause(); one.currentTime = 1.5; }")
        wait_for(lambda player=player: not player.evaluate("(one) => one.seeking"), "the place", 20)
        assert player.evaluate("(one) => one.currentTime") == 1.5
    page.get_by_role("button", name="Before and after").click()
    expect(page.locator(".pair video")).to_have_count(2)
    expect(page.locator(".pair audio")).to_have_count(2)
    assert serious_problems(page) == []


def test_the_slider_shows_each_step_and_the_table_all_of_them(page: Page) -> None:
    image, slider = page.locator(".sample-box img"), page.get_by_role("slider", name="Step of the samples")
    expect(image).to_have_attribute("alt", "a image, step 30")
    slider.focus()
    for number in (20, 10):
        slider.press("ArrowLeft")
        expect(image).to_have_attribute("alt", f"a image, step {number}")
    page.get_by_role("button", name="All steps").click()
    table = page.get_by_role("region", name="Samples of all steps")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table.locator("thead th")).to_have_text(["Prompt", "10", "20", "30"])
    table.get_by_role("button", name="Show sample 1 of step 20").click()
    expect(image).to_have_attribute("alt", "a image, step 20")
