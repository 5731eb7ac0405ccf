"""Extensions of a run by one object and one line: a callback, a sink of events, a part of the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.checkpoint.state_parts import SavedState
from gracetune.telemetry.events import Record
from gracetune.train import callbacks, logs, run, state_parts
from gracetune.train.hooks import Callback, RunEnds, RunStarts, StepEnds, StepStarts
from gracetune.train.job import TrainingJob
from gracetune.train.logs import SinkEntry
from gracetune.train.state_parts import CheckpointSource, StatePart
from runs.made_runs import TinyModel, config_for
from runs.made_runs import run as train_run


@dataclass
class Seen(Callback):
    """Records every event of a callback."""

    lines: list[str] = field(default_factory=list)

    def start(self, begun: RunStarts) -> None:
        self.lines.append(f"starts at {begun.position.step} of {begun.steps}")

    def step_starts(self, coming: StepStarts) -> None:
        self.lines.append(f"step after {coming.position.step}, {coming.step_batch.samples} sample")

    def step_ends(self, done: StepEnds) -> None:
        self.lines.append(f"step {done.step} done, {len(done.batches)} batch")

    def end(self, ended: RunEnds) -> None:
        self.lines.append(f"{ended.stop.kind} at {ended.position.step}")


@dataclass
class Kept:
    """A sink that keeps the records."""

    name: str = "what a test keeps"
    kinds: list[str] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.kinds.append(type(record.event).__name__)

    def close(self) -> None:
        self.kinds.append("closed")


@dataclass
class Counter:
    """State of an extension."""

    value: int = 0

    def save(self, saved: CheckpointSource) -> SavedState:
        self.value += saved.state.position.step
        return SavedState({"version": 1}, {"value": torch.tensor(self.value)})

    def load(self, saved: CheckpointSource, held: SavedState) -> tuple[str, ...]:
        self.value = int(held.tensors["value"])
        return (f"the counter goes on from {self.value}",)


def test_a_callback_a_sink_and_a_part_of_the_checkpoint_are_one_line_each(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, kept, counter = Seen(), Kept(), Counter()
    monkeypatch.setattr(state_parts, "PARTS", (*state_parts.PARTS, StatePart("counter", counter.save, counter.load)))
    monkeypatch.setattr(logs, "SINKS", (*logs.SINKS, SinkEntry(lambda config: True, lambda *_: kept)))

    def with_one_more(*given: Any) -> callbacks.RunCallbacks:
        found = callbacks.callbacks_of(*given)
        return replace(found, ordered=(*found.ordered, seen))

    monkeypatch.setattr(run, "callbacks_of", with_one_more)
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2})
    train_run(config)
    assert seen.lines == [
        "starts at 0 of 2", "step after 0, 1 sample", "step 1 done, 1 batch", "step after 1, 1 sample",
        "step 2 done, 1 batch", "finished at 2",
    ]  # fmt: skip
    assert kept.kinds[0] == "RunStarted"
    assert kept.kinds[-2:] == ["RunEnded", "closed"]
    assert kept.kinds.count("StepDone") == 2
    assert (counter.value, (tmp_path / "out" / "checkpoints" / "checkpoint-2" / "counter.json").is_file()) == (2, True)
    counter.value, seen.lines = 0, []
    longer = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 3})})
    notes = train_run(longer).notes
    assert "the counter goes on from 2" in notes
    assert (counter.value, seen.lines[0]) == (2 + 3, "starts at 2 of 3")


def test_a_job_is_complete_when_it_is_made() -> None:
    """It is frozen, and has no attribute that is set later."""
    made: Mapping[str, Any] = {one.name: one for one in dataclasses.fields(TrainingJob)}
    assert all(TrainingJob.__dataclass_params__.frozen for _ in made)  # type: ignore[attr-defined]
    assert not [name for name, one in made.items() if "None" in str(one.type) and "Callable" not in str(one.type)]
