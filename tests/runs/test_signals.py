"""Signals in every phase of a run: while it caches, trains, generates samples, or writes its files."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import time
from pathlib import Path

import pytest

from gracetune.cache.pass_worker import PassProgress
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import RunEnded, ValidationDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.control import InterruptedBySignal
from gracetune.train.run import RunOptions, train
from gracetune.train.view import CollectingView
from runs.launched import command_line, start, start_ranks, write_config
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import Interrupting, assert_same_end, losses

GENERATED = {"every_steps": 2, "steps": 1, "width": 64, "height": 64, "prompts": [{"prompt": str(n)} for n in range(3)]}


class Signalling(CollectingView):
    """Sends a signal when a reported line begins with the given text."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line, self.encoded = line, 0

    def report(self, text: str) -> None:
        super().report(text)
        if text.startswith(self.line):
            os.kill(os.getpid(), signal.SIGTERM)


class Caching(CollectingView):
    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.encoded = at, 0

    def on_latents(self, progress: PassProgress) -> None:
        self.encoded = max(self.encoded, progress.total)
        if progress.done == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def ended(config: RunConfig) -> RunEnded:
    events = read_log(Path(config.output_dir) / "logs" / "events.jsonl").records
    (found,) = [record.event for record in events if isinstance(record.event, RunEnded)]
    return found


@pytest.mark.parametrize(
    ("number", "variables"),
    [
        pytest.param(signal.SIGHUP, {}, id="SIGHUP", marks=pytest.mark.full),
        pytest.param(signal.SIGXCPU, {}, id="SIGXCPU", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR2, {}, id="SIGUSR2", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, {"GRACETUNE_SIGUSR1": "stop"}, id="SIGUSR1"),
    ],
)
def test_while_training_the_step_is_completed_and_saved(
    number: signal.Signals, variables: dict[str, str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 3})
    view = Interrupting(2, number)
    result = train(config, environment=Environment(variables), options=RunOptions(), view=view)
    assert result.stop is not None
    assert (result.stop.kind, result.stop.reason, result.step) == ("interrupted", number.name, 2)
    assert any(line.startswith(f"{number.name}: the step is completed") for line in view.lines)
    assert (Path(config.output_dir) / "checkpoints" / "checkpoint-2").is_dir()
    assert (ended(config).outcome, ended(config).reason) == ("interrupted", number.name)


def test_while_caching_the_run_ends_and_what_is_cached_is_kept(tiny_model: TinyModel, tmp_path: Path) -> None:
    one_by_one = {"vae_batch_size": 1}
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 1}, cache=one_by_one)
    with pytest.raises(InterruptedBySignal, match="SIGTERM"):
        run(config, Caching(at=2))
    again = Caching()
    assert run(config, again).step == 1
    assert again.encoded == 2, "of four pictures two were done"


def test_after_the_last_step_the_files_are_completed(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2})
    view = Signalling("tiny.safetensors: ")  # written, and compared with the model
    result = run(config, view)
    assert result.stop is not None
    assert result.stop.kind == ended(config).outcome == "finished"
    assert any(line.startswith("SIGTERM: the files of the run are completed first") for line in view.lines)
    assert (Path(config.output_dir) / "report.html").is_file()


@pytest.mark.full
def test_samples_that_are_not_drawn_yet_are_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 4}, validation=GENERATED)
    view = Interrupting(2)  # before that step's samples
    run(config, view)
    assert "samples at step 2: 3 left out, the run is stopping" in view.lines
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").records
    assert [record.event.files for record in records if isinstance(record.event, ValidationDone)] == [()]


@pytest.mark.full
def test_the_command_ends_while_it_caches(tiny_model: TinyModel, tmp_path: Path) -> None:
    """It ends with exit code 3 and one line instead of a traceback. The same command resumes."""
    data = {"id": "many", "path": str(images(tmp_path / "many", 120)), "resolution": 64.0}
    sections = {"datasets": [data], "training": {"max_steps": 1}, "cache": {"vae_batch_size": 1}}
    config = config_for("flux", tiny_model, tmp_path, **sections)
    file = write_config(config, tmp_path / "c.yaml")
    process = start(command_line("train", str(file)))
    shards = Path(config.output_dir) / "cache"
    while not list(shards.rglob("*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "interrupted by SIGTERM; staged data is lost, caches and checkpoints stay" in errors
    assert "Traceback" not in errors
    assert not out
    assert run(config).step == 1


@pytest.mark.full
def test_a_terminal_that_is_closed_saves_and_ends_the_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the terminal's session, and the terminal can no longer be written."""
    whole = config_for("flux", tiny_model, tmp_path / "whole", training={"max_steps": 200})
    run(whole)
    config = whole.model_copy(update={"output_dir": str(tmp_path / "parted")})
    log = Path(config.output_dir) / "logs" / "events.jsonl"
    file = write_config(config, tmp_path / "c.yaml")
    child, master = pty.fork()
    if child == 0:
        import sys

        os.execv(sys.executable, [sys.executable, *command_line("train", str(file))])
    while not (log.exists() and '"step":3' in log.read_text()):
        if select.select([master], [], [], 0.01)[0]:
            os.read(master, 4096)
    os.close(master)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert ended(config).reason == "SIGHUP"
    assert run(config).step == 200
    assert losses(config) == losses(whole)
    assert_same_end(whole, config, 200)


@pytest.mark.full
def test_a_signal_to_one_process_stops_all_at_the_same_step(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2000}, logging={"trackers": []})
    file = write_config(config, tmp_path / "c.yaml")
    ranks = start_ranks(2, command_line("train", str(file)))
    log = Path(config.output_dir) / "logs" / "events.jsonl"
    while not (log.exists() and '"step":3' in log.read_text()):
        assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGTERM)
    stated = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3], stated
    assert ended(config).reason == "rank 1: SIGTERM"
    saved = json.loads((Path(config.output_dir) / "report.json").read_text())
    assert saved["outcome"] == "interrupted"
    assert not any("Traceback" in errors for _, errors in stated)
