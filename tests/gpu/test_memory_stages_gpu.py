"""Whole runs on a GPU made small: the overflow arena is used, and the event log and the report say when and why.

The GPU is "full" because torch may use so much of it and no more; managed memory stays under 4 GiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from gracetune.config.environment import make_cublas_deterministic
from gracetune.config.run_config import RunConfig
from gracetune.memory.experiment_tools import tidy
from gracetune.memory.native import Uvm
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.telemetry.events import (
    Event,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    OverflowArenaChanged,
    StepDone,
)
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.run import RunOptions, train
from gracetune.train.view import CollectingView
from gracetune.units import GIB, MIB, format_bytes
from runs.made_runs import ALONE, TinyModel, config_for, images
from runs.test_resume import losses

pytestmark = pytest.mark.gpu

make_cublas_deterministic()  # before any test starts CUDA

SIDES = ((0, 64), (4, 512), (6, 640), (8, 64))
"""From this step on, images of this side: they fit, spill, spill more, and fit again."""
STEPS = 14

Kind = TypeVar("Kind", bound=Event)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


class Measured(CollectingView):
    """What every step held at its highest point."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "first batch":
            tidy(0)
        yield

    def on_step(self, step: int, steps: int) -> None:
        self.peaks[step], self.reserved[step] = torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0)
        torch.cuda.reset_peak_memory_stats(0)


class SmallGpu(CollectingView):
    """Once the model is loaded, torch may use `usable` bytes of the GPU, the arena not counted."""

    def __init__(self, usable: int) -> None:
        super().__init__()
        self.usable, self.arena = usable, 0
        self.lines: list[str] = []

    def on_memory(self, memory: UnifiedMemory) -> None:
        self.arena = memory.uvm_stats().arena_reserved_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "first batch":
            assert tidy(0) - self.arena < self.usable, "the model alone"
            total = torch.cuda.mem_get_info(0)[1]
            torch.cuda.set_per_process_memory_fraction((self.arena + self.usable) / total, 0)
        yield

    def on_status(self, status: Any) -> None:
        self.lines.append(status.line())


def config(root: Path, tiny_model: TinyModel, **sections: Any) -> RunConfig:
    ends = [step for step, _ in SIDES[1:]]
    datasets = [
        {
            "id": f"from-{step}", "path": str(images(root / f"from-{step}", 8, side)), "resolution": float(side),
            "start_step": step, "end_step": end,
        }
        for (step, side), end in zip(SIDES, [*ends, None], strict=True)
    ]  # fmt: skip
    training = {"max_steps": STEPS, "batch_size": 8, "compile": "off", "attention": "math"}
    return config_for(
        "wan", tiny_model, root, datasets=datasets, training=training,
        logging={"every_steps": 5, "trackers": []}, **sections,
    )  # fmt: skip


def events(run: RunConfig, kind: type[Kind]) -> list[Kind]:
    log = read_log(Path(run.output_dir) / "logs" / "events.jsonl")
    return [record.event for record in log.records if isinstance(record.event, kind)]


def test_stages_and_reclamations_of_a_full_gpu_are_in_the_log_and_the_report(
    uvm: Uvm, tiny_model: TinyModel, tmp_path: Path
) -> None:
    before = uvm.total_stats().live_bytes
    plain = config(tmp_path / "plain", tiny_model)
    measured = Measured()
    train(plain, environment=ALONE, options=RunOptions(), view=measured)
    first, more, fits = (SIDES[place][0] for place in (1, 2, 3))  # the steps done when each begins
    usable = int(1.5 * measured.reserved[first])
    needs = ", ".join(f"{step}: {format_bytes(peak)}" for step, peak in measured.peaks.items())
    assert measured.peaks[first + 1] > 1.1 * usable, f"the larger images have to spill; {needs}"
    assert measured.peaks[more + 1] > 1.2 * measured.peaks[first + 1], needs

    small = config(
        tmp_path / "small", tiny_model, memory={"use_uvm": True, "uvm_oversubscription_ratio": 1.015},
    )  # fmt: skip
    view = SmallGpu(usable)
    train(small, environment=ALONE, options=RunOptions(), view=view, on_memory=view.on_memory)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert 0 < view.arena <= 4 * GIB
    assert uvm.total_stats().live_bytes == before, "everything managed was given back"
    assert losses(small) == losses(plain)

    # Stages: up with the first step that spills, down after three calm ones. Between two log steps as at them.
    up, down = events(small, MemoryStageChanged)
    assert (up.step, up.before, up.after) == (first + 1, 1, 2), up.reason
    assert (down.before, down.after) == (2, 1)
    assert fits + 3 <= down.step < STEPS, down.reason
    light, *hard = events(small, MemoryReclaimed)
    assert (light.step, light.extent) == (up.step, "light")
    assert light.released_bytes is not None
    assert light.released_bytes > 0
    assert {one.extent for one in hard} == {"hard"}, "the larger images make the arena grow"
    assert any("the arena grew" in one.reason for one in hard)
    used = events(small, OverflowArenaChanged)
    assert (used[0].step, used[0].before_bytes, used[-1].after_bytes) == (up.step, 0, 0)
    assert max(one.after_bytes for one in used) <= view.arena
    assert "memory is tight" in {one.reason for one in events(small, LookAheadChanged)}

    samples = events(small, MemorySampled)
    for sample in samples:
        assert abs(sample.capacity_bytes["device"] - usable) <= MIB
        assert sample.capacity_bytes["arena"] == view.arena
        assert sample.capacity_bytes["host"] > 0
    counters = samples[-1].counters
    assert (counters["uvm.transitions"], counters["uvm.light_reclamations"]) == (2, 1)
    assert counters["uvm.hard_reclamations"] == len(hard)
    assert counters["uvm.arena_peak_bytes"] >= max(one.after_bytes for one in used)
    at_log_steps = {sample.step: sample.counters["uvm.stage"] for sample in samples}
    assert at_log_steps | {10: 2} == {5: 2, 10: 2, STEPS: 1}, "the first, the last, and after changes"
    assert any(" · memory stage 2 · " in line for line in view.lines)
    assert f"step {up.step}: memory {up.reason}" in view.lines

    # The report has them all.
    facts = json.loads((Path(small.output_dir) / "report.json").read_text())
    assert [one["after"] for one in facts["memory_stage_changes"]] == [2, 1]
    assert [one["extent"] for one in facts["reclamations"]] == ["light", *("hard" for _ in hard)]
    page = (Path(small.output_dir) / "report.html").read_text()
    assert "memory stage: from 1 to 1, lowest 1, highest 2" in page
    assert f"step {up.step}: light reclamation" in page

    # Without the layer there is no stage, and the capacities are there all the same.
    assert [event for kind in (MemoryStageChanged, MemoryReclaimed) for event in events(plain, kind)] == []
    assert {sample.capacity_bytes["device"] for sample in events(plain, MemorySampled)} == {
        torch.cuda.mem_get_info(0)[1]
    }
    assert len(events(plain, StepDone)) == len(events(small, StepDone))
