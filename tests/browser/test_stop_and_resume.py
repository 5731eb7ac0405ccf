"""A run that is stopped and resumed in a browser ends bit for bit like one that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenPage, run_id, tiny_config
from browser.studio_process import Studio, events, process, steps_done, wait_for
from runs.launched import write_config
from runs.made_runs import TinyModel

STEPS = 120


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in events(run) if line["kind"] == "StepDone"}


@pytest.mark.timeout(600)
def test_stop_saves_and_resume_continues_bit_exact(
    open_page: OpenPage, control: Studio, root: Path, tiny_model: TinyModel
) -> None:
    runs = {}
    for name in ("whole", "stopped"):
        config = tiny_config(tiny_model, root, name, STEPS)
        # The same images in the same folder: their paths are part of what the samples' order depends on.
        config = config.model_copy(update={"datasets": tiny_config(tiny_model, root, "whole", STEPS).datasets})
        runs[name] = (write_config(config, root / f"{name}.yaml"), Path(config.output_dir))
    file, whole = runs["whole"]
    with process("train", str(file), output=root / "whole.txt") as started:
        assert started.wait(240) == 0, (root / "whole.txt").read_text()

    file, stopped = runs["stopped"]
    page = open_page(control)
    with process("train", str(file), output=root / "stopped.txt") as started:
        wait_for(lambda: steps_done(stopped) >= 3, "the first steps", 120)
        page.goto(f"{control.address}#/run/{run_id(page, 'stopped')}")
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        started.wait(120)
    expect(page.locator(".head-state")).to_contain_text("stopped", timeout=20_000)
    at = steps_done(stopped)
    assert 3 <= at < STEPS
    assert (stopped / "checkpoints" / f"checkpoint-{at}").is_dir()

    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    wait_for(lambda: any(line["kind"] == "RunEnded" and line["outcome"] == "finished" for line in events(stopped)),
             "the resumed run's end", 240)  # fmt: skip
    expect(page.locator(".head-state")).to_contain_text("finished", timeout=20_000)
    assert losses(stopped) == losses(whole)
    weights = [next(run.glob("*.safetensors")).read_bytes() for run in (whole, stopped)]
    assert _tensors(weights[0]) == _tensors(weights[1])


def _tensors(file: bytes) -> bytes:
    """What follows the header, which names the run."""
    return file[8 + int.from_bytes(file[:8], "little") :]
