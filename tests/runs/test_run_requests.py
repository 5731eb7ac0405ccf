"""Requests to a running job: save now and stop now, by command and by file; what is left of them; and the events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import CheckpointWritten, RequestServed, RunEnded
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.run_requests import REQUESTS
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, run
from runs.test_commands import gracetune as command
from runs.test_resume import COSINE, STEPS, assert_same_end, losses


class Asking(CollectingView):
    """Types a command after a step, as a user does in another terminal."""

    def __init__(self, folder: str, commands: dict[int, str]) -> None:
        super().__init__()
        self.folder, self.commands = folder, commands

    def on_step(self, step: int, steps: int) -> None:
        if step in self.commands:
            assert command(self.commands[step], self.folder) == 0


def events(config: RunConfig, kind: type) -> list[Any]:
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").records
    return [record.event for record in records if isinstance(record.event, kind)]


def test_save_and_stop_on_request_and_resume_bit_for_bit(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = config_for("sdxl", tiny_model, tmp_path / "whole", **COSINE)
    run(whole)
    parted = config_for("sdxl", tiny_model, tmp_path / "parted", **COSINE)
    folder = Path(parted.output_dir)
    first = run(parted, Asking(parted.output_dir, {2: "save-now", 5: "stop"}))
    assert "after the current step" in capsys.readouterr().out
    assert first.stop is not None
    assert (first.stop.kind, first.step, first.stop.reason) == ("interrupted", 5, "gracetune stop (command)")
    assert not [one for one in REQUESTS.values() if (folder / one.file).exists()]
    assert [one.step for one in events(parted, CheckpointWritten)] == [2, 5]
    assert (folder / "tiny_000000002.safetensors").is_file(), "a saved step has weights that other programs load"
    found = [(one.request, one.step, one.source) for one in events(parted, RequestServed)]
    assert found == [("save", 2, "command"), ("stop", 5, "command")]
    # A request that is no longer read must not stop the next process.
    (folder / "stop-now").touch()
    second = run(parted)
    assert second.stop is not None
    assert (second.stop.kind, second.step) == ("finished", STEPS)
    assert losses(parted) == losses(whole)
    assert_same_end(whole, parted)


class Touching(CollectingView):
    """Creates requests by hand while the run is prepared."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def report(self, text: str) -> None:
        super().report(text)
        if self.folder.is_dir():
            (self.folder / "save-now").mkdir(exist_ok=True)
            (self.folder / "stop-now").write_text("<script>" * 100)


def test_a_stop_while_the_run_is_prepared_ends_it_before_its_first_step(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("sdxl", tiny_model, tmp_path, **COSINE)
    view = Touching(Path(config.output_dir))
    result = run(config, view)
    assert result.stop is not None
    assert (result.stop.kind, result.step) == ("interrupted", 0)
    assert [(one.request, one.step, one.source) for one in events(config, RequestServed)] == [("stop", 0, "file")]
    assert events(config, RunEnded)[0].outcome == "interrupted"


def test_a_request_that_cannot_be_removed_is_ignored_with_one_warning(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("sdxl", tiny_model, tmp_path, **COSINE)
    folder = Path(config.output_dir)

    class InTheWay(CollectingView):
        def on_step(self, step: int, steps: int) -> None:
            (folder / "save-now").mkdir(exist_ok=True)

    view = InTheWay()
    result = run(config, view)
    assert result.step == STEPS
    assert len([text for text in view.warnings if "save-now is ignored" in text]) == 1
    assert events(config, RequestServed) == []


@pytest.mark.parametrize("name", ["validate-now", "save-now", "stop"])
def test_a_request_to_no_run_says_so(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert command(name, str(tmp_path)) == 1
    assert "no run is active here" in capsys.readouterr().err
    assert command(name, str(tmp_path / "missing")) == 1
    assert "no such folder" in capsys.readouterr().err
