"""What commands make of a run's folder: `report` at any time, `adapter pick` and `data judge`."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from faults.injection import Fault, environment_of
from gracetune.adapters.checkpoint_choice import Candidate, recommend
from gracetune.config import load
from gracetune.telemetry.report.judged_losses import read_losses
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
            self.codes.append(gracetune("data", "judge", str(self.folder)))  # only after a run
            self.page = (self.folder / "report.html").read_text()


@pytest.fixture(scope="module")
def finished(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Reporting:
    """A run with samples, held-out losses and checkpoints. Its config is as a user writes it, without a format."""
    folder = tmp_path_factory.mktemp("finished")
    photos = images(folder / "images", 8)
    shutil.copy(photos / "00.png", photos / "copy.png")
    (photos / "copy.txt").write_text("another caption")
    Image.new("RGB", (40, 40), (200, 30, 90)).save(photos / "small.png")
    (photos / "small.txt").write_text("a small square")
    written = {
        "gracetune": 1, "name": "tiny", "output_dir": str(folder / "out"),
        "model": {"family": "sdxl", "path": str(tiny_model("sdxl", "base-1.0"))},
        "datasets": [
            {"id": "a", "path": str(photos), "resolution": 64},
            {"id": "held out", "path": str(images(folder / "held_out", 2)), "resolution": 64, "dataset_type": "eval"},
        ],
        "adapter": {"rank": 4}, "training": {"max_steps": 6}, "logging": {"every_steps": 1},
        "checkpoints": {"every_steps": 2}, "optimizer": {"lr": 0.01},
        "validation": {"prompts": ["a square"], "every_steps": 3, "at_start": True, "steps": 1, "width": 64,
                       "height": 64, "loss_every_steps": 2},
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(json.dumps(written))
    view = Reporting(folder / "out")
    run(load(file, environment=ALONE).config, view)
    return view


def copied(finished: Reporting, folder: Path, *, without: str) -> Path:
    """The run's folder without the events of a kind."""
    shutil.copytree(finished.folder, folder)
    log = folder / "logs" / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if f'"{without}"' not in line))
    return folder


def test_a_report_at_any_time(finished: Reporting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finished.codes == [0, 1]
    assert "Running: this report shows the run up to its last event" in finished.page
    assert re.search("<dd>[23] of 6</dd>", finished.page)

    assert gracetune("report", str(finished.folder), "--json") == 0
    written = json.loads(capsys.readouterr().out)
    page, facts = (Path(written[name]).read_text() for name in ("html", "json"))
    assert page.index("Samples through time") < page.index("How to load the result") < page.index("<h2>Loss</h2>")
    assert page.count('<img src="data:image/jpeg;base64,') >= 3
    steps = json.loads(facts)["how_to_load"]
    assert "Copy tiny.safetensors into ComfyUI" in steps["ComfyUI"]
    names: dict[str, Any] = {}
    exec(steps["diffusers"], names)  # pasted
    assert names["pipe"].get_list_adapters() == {"unet": ["default_0"]}

    crashed = copied(finished, tmp_path / "crashed", without="RunEnded")
    assert gracetune("report", str(crashed)) == 0
    assert "its process was killed" in (crashed / "report.html").read_text()

    assert gracetune("report", str(tmp_path)) == 1
    assert "name the run's folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
@pytest.mark.parametrize(("operation", "place"), [("read", "logs/*"), ("write", ".gracetune-*"), ("sync", "*")])
def test_a_file_server_that_fails(operation: Any, place: str, finished: Reporting, tmp_path: Path) -> None:
    """Most of these errors are of a descriptor and name no file."""
    folder = copied(finished, tmp_path / "out", without="nothing")
    environment = environment_of([Fault(f"{folder}/{place}", operation, errno.ESTALE)])
    done = subprocess.run(
        [sys.executable, "-m", "gracetune", "report", str(folder)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Stale file handle" in done.stderr
    assert f"findmnt -T {folder}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_checkpoint_is_picked(finished: Reporting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune("adapter", "pick", str(finished.folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    events = [json.loads(line) for line in (finished.folder / "logs" / "events.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["mean"] for one in events if one["kind"] == "HeldOutLoss"}
    candidates = {one["step"]: one for one in found["candidates"]}
    assert [*candidates] == [2, 4, 6]
    assert found["base_held_out_loss"] == losses[0]
    assert all(one["held_out_loss"] == losses[step] for step, one in candidates.items())
    assert 0 < candidates[2]["drift"][""] < candidates[6]["drift"][""] < 1
    assert candidates[6]["samples"]
    assert not candidates[2]["samples"], "nothing was generated at this step"
    best = min(losses[step] for step in candidates)
    assert losses[found["recommended"]] <= best + 0.05 * (max(losses[0], best) - best)
    page = Path(found["report"]).read_text()
    assert "Which checkpoint?" in page
    assert f"Step {found['recommended']} (recommended)" in page

    unmeasured = copied(finished, tmp_path / "unmeasured", without="HeldOutLoss")
    assert gracetune("adapter", "pick", str(unmeasured)) == 0
    shown = capsys.readouterr().out
    assert "no recommendation: unknown, because no held-out loss" in shown
    assert "✓" not in shown
    assert gracetune("adapter", "pick", str(unmeasured), "--model", str(tmp_path / "gone")) == 1
    assert "is not a folder on this machine" in " ".join(capsys.readouterr().err.split())
    for file in unmeasured.glob("*.safetensors"):
        file.unlink()
    assert gracetune("adapter", "pick", str(unmeasured)) == 1
    assert "adapter files of the run tiny" in capsys.readouterr().err


@pytest.mark.full
def test_the_images_are_judged(finished: Reporting, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in finished.folder.rglob("*") if path.parts[len(finished.folder.parts)] != "report")
    assert gracetune("data", "judge", str(finished.folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 6
    assert {one["path"] for one in found["images"]} == {*(f"{n:02}.png" for n in range(8)), "copy.png", "small.png"}
    events = [json.loads(line) for line in (finished.folder / "logs" / "events.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["mean"] for one in events if one["kind"] == "HeldOutLoss"}
    assert found["held_out_loss"]["first"] == pytest.approx(losses[0], rel=1e-3), "the run's own weights and noise"
    assert found["held_out_loss"]["last"] == pytest.approx(losses[6], rel=1e-3)
    assert losses[0] != pytest.approx(losses[6], rel=3e-3)
    findings = {one["kind"]: one for one in found["findings"]}
    assert findings["duplicate"]["images"] == ["00.png", "copy.png"]
    assert findings["duplicate"]["reason"] == "2 times the same file, with 2 different captions"
    assert findings["too small"]["images"] == ["small.png"]
    judged = read_losses(finished.folder)
    assert judged is not None
    assert judged.losses["a", "small.png"] == next(
        (one["first_loss"], one["last_loss"]) for one in found["images"] if one["path"] == "small.png"
    )
    assert judged.findings["a", "copy.png"] == ("duplicate: 2 times the same file, with 2 different captions",)
    page = Path(found["report"]).read_text()
    assert "Data: what the losses of single images show" in page
    assert 'alt="small.png: scaled up 1.6 times"' in page
    after = sorted(path for path in finished.folder.rglob("*") if path.parts[len(finished.folder.parts)] != "report")
    assert after == before, "nothing else in the folder changed"

    assert gracetune("data", "judge", str(finished.folder), "--most", "3") == 0
    shown = capsys.readouterr().out
    assert "3 of 10 images are judged, evenly chosen; --most N judges more" in shown
    assert gracetune("data", "judge", str(finished.folder / "samples")) == 1
    assert "no config.yaml in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("losses", "base", "chosen", "reason"),
    [
        ({10: 0.5, 20: 0.4, 30: 0.45}, 0.6, 20, "later ones are worse (0.45 at step 30)"),
        ({10: 0.5, 20: 0.401, 30: 0.4}, 0.6, 20, "as good as the lowest, 0.4"),
        ({10: 0.7, 20: 0.8}, 0.6, 10, "not below that of the base model, 0.6"),
        ({10: math.nan, 20: 0.5, 30: None}, None, 20, "2 of 3 checkpoints have no held-out loss"),
        ({10: None}, 0.6, None, "unknown"),
        ({}, None, None, "unknown"),
    ],
)
def test_the_recommendation(
    losses: dict[int, float | None], base: float | None, chosen: int | None, reason: str
) -> None:
    candidates = [
        Candidate(step, (), {} if loss is None else {"": loss}, {}, {}, ()) for step, loss in losses.items()
    ]  # fmt: skip
    found, why = recommend(candidates, base)
    assert (found.step if found else None) == chosen
    assert reason in why
