"""`gracetune report` on a finished, a running and a crashed run, and what its page says about the run's own file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import load
from gracetune.config.run_config import RunConfig
from gracetune.train.view import View
from runs.made_runs import ALONE, TinyModel, images, run
from runs.test_commands import gracetune


class Reporting(View):
    """Asks for a report at a step, as a user would in a second terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.codes, self.page = folder, list[int](), ""

    def on_step(self, step: int, steps: int) -> None:
        if step == 3:
            self.codes.append(gracetune("report", str(self.folder)))
            self.page = (self.folder / "report.html").read_text()


def config_without_a_format(tiny_model: TinyModel, folder: Path) -> RunConfig:
    """As a user writes it. SDXL's default format is loaded by ComfyUI and diffusers."""
    samples = {"prompts": ["a square"], "every_steps": 5, "at_start": True, "steps": 1, "width": 64, "height": 64}
    written = {
        "gracetune": 1, "name": "tiny", "output_dir": str(folder / "out"),
        "model": {"family": "sdxl", "path": str(tiny_model("sdxl", "base-1.0"))},
        "datasets": [{"id": "a", "path": str(images(folder / "images")), "resolution": 64}],
        "adapter": {"rank": 4}, "training": {"max_steps": 5}, "validation": samples, "logging": {"every_steps": 1},
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(json.dumps(written))
    return load(file, environment=ALONE).config


def test_a_report_at_any_time(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_without_a_format(tiny_model, tmp_path)
    folder = Path(config.output_dir)
    view = Reporting(folder)
    run(config, view)
    assert view.codes == [0]
    assert "Running: this report shows the run up to its last event" in view.page
    assert re.search("<dd>[23] of 5</dd>", view.page)

    capsys.readouterr()
    assert gracetune("report", str(folder), "--json") == 0
    written = json.loads(capsys.readouterr().out)
    page, facts = (Path(written[name]).read_text() for name in ("html", "json"))
    assert page.index("Samples through time") < page.index("How to load the result") < page.index("<h2>Loss</h2>")
    assert page.count('<img src="data:image/jpeg;base64,') == 2
    steps = json.loads(facts)["how_to_load"]
    assert "Copy tiny.safetensors into ComfyUI" in steps["ComfyUI"]
    names: dict[str, Any] = {}
    exec(steps["diffusers"], names)  # pasted
    assert names["pipe"].get_list_adapters() == {"unet": ["default_0"]}

    crashed = tmp_path / "crashed"
    shutil.copytree(folder, crashed)
    log = crashed / "logs" / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "RunEnded" not in line))
    assert gracetune("report", str(crashed)) == 0
    assert "its process was killed" in (crashed / "report.html").read_text()

    assert gracetune("report", str(tmp_path)) == 1
    assert "name the run's folder" in " ".join(capsys.readouterr().err.split())
