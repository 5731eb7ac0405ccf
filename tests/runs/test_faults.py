"""Runs on a machine at its limits, in their own processes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from gracetune.memory.sensors import Vitals
from gracetune.memory.watchdog import Floors, Watchdog
from gracetune.train.step import TrainStep
from runs.launched import ROOT, start, write_config
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import assert_same_end, losses

ROOM_NEEDED = re.compile(r"expected +[\d.]+ [KMG]iB free")


def meet(fault: str, file: Path) -> tuple[Any, str]:
    """The process's stdout and stderr."""
    process = start([str(Path(__file__).with_name("faults.py")), fault, str(file)], PYTHONPATH=str(ROOT / "tests"))
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    lines = out.splitlines()
    assert lines, errors
    return json.loads(lines[-1]), errors


@pytest.mark.full
def test_memory_rejected_at_the_first_batch_says_what_the_plan_was_and_what_to_change(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    data = {"id": "large", "path": str(images(tmp_path / "large", 2, 512)), "resolution": 512.0}
    config = config_for("flux", tiny_model, tmp_path, datasets=[data], training={"batch_size": 2, "max_steps": 1})
    stated, _ = meet("memory", write_config(config, tmp_path / "c.yaml"))
    for part in (
        "out of memory after 0 steps, at a micro-batch of 2",
        "the plan",
        "training.gradient_checkpointing=full",
    ):
        assert part in stated
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.full
def test_a_disk_that_fills_up_while_checkpoints_are_written(tiny_model: TinyModel, tmp_path: Path) -> None:
    """There is no traceback, all files are complete, and with more room the same command resumes."""
    config = config_for(
        "flux", tiny_model, tmp_path, training={"max_steps": 40}, checkpoints={"every_steps": 1, "keep_last": 100},
        logging={"every_steps": 10, "trackers": []},
    )  # fmt: skip
    message, errors = meet(str(3 << 20), write_config(config, tmp_path / "c.yaml"))
    if "skip" in message:
        pytest.skip(message["skip"])
    assert message["codes"] == [1, 0], errors
    assert "Traceback" not in errors
    assert "No space left" in errors or ROOM_NEEDED.search(errors)
    assert [name for name in message["there"] if name.startswith("checkpoint-")]
    assert not message["left"]
    assert "torchvision" not in errors
    assert '"outcome":"finished"' in message["ended"]


@pytest.mark.full
def test_no_room_for_a_checkpoint_is_said_before_the_first_step(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for(
        "flux", tiny_model, tmp_path, training={"max_steps": 2}, cache={"cache_dir": str(tmp_path / "elsewhere")},
    )  # fmt: skip
    message, errors = meet(str(64 << 10), write_config(config, tmp_path / "c.yaml"))
    if "skip" in message:
        pytest.skip(message["skip"])
    assert message["codes"] == [1, 0], errors
    assert "Traceback" not in errors
    assert ROOM_NEEDED.search(errors)
    assert not [name for name in message["there"] if name.startswith("checkpoint-")]
    assert '"outcome":"finished"' in message["ended"]


@pytest.mark.full
def test_samples_and_reports_that_find_no_room_are_said_and_the_run_goes_on(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    requested = {"every_steps": 1, "steps": 1, "width": 64, "height": 64, "prompts": [{"prompt": "a"}, {"prompt": "b"}]}
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 1}, validation=requested)
    message, errors = meet("samples", write_config(config, tmp_path / "c.yaml"))
    if "skip" in message:
        pytest.skip(message["skip"])
    assert message["code"] == 0, errors
    assert "Traceback" not in errors
    assert "_seed3.png could not be written" in errors
    assert "_sheet.png could not be written" in errors
    assert "the report could not be written" in errors
    assert "tiny.safetensors" in message["there"]
    assert not [name for name in message["there"] if name.endswith((".png", ".tmp"))]


def test_memory_that_runs_out_inside_a_window_stops_the_run_before_the_next_micro_batch(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real watchdog, with a sensor that sees memory vanish. The step in progress leaves no trace."""
    step = {"training": {"max_steps": 3, "gradient_accumulation_steps": 4}}
    whole = config_for("flux", tiny_model, tmp_path / "whole", **step)
    run(whole)
    stopped = config_for("flux", tiny_model, tmp_path / "stopped", **step)
    micro_batches, original = 0, TrainStep.__call__
    dog = Watchdog(
        lambda: Vitals(1 << 30 if micro_batches < 8 else 0, None), Floors(host=1 << 20), report=lambda event: None,
        period=0.005,
    )  # fmt: skip

    def counted(self: TrainStep, *args: Any) -> Any:
        nonlocal micro_batches
        micro_batches += 1  # the first two are the first batch's
        while micro_batches == 8 and dog.requested() is None:
            time.sleep(0.005)
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", counted)
        patched.setattr("gracetune.train.load.watch", lambda *_: dog)
        result = run(stopped)
    assert result.stop is not None
    assert (result.stop.kind, result.step, micro_batches) == ("interrupted", 1, 8)
    assert result.stop.reason.startswith("memory: ")
    assert run(stopped).step == 3
    assert losses(stopped) == losses(whole)
    assert_same_end(whole, stopped, 3)
