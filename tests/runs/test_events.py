"""Every event of the schema, in the log of a whole run, where and when it happened."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import gracetune.train.loop
from gracetune.cli.main import main
from gracetune.config.memory_options import MemoryOptions
from gracetune.hardware import probe
from gracetune.hostmem.sensors import HostSensor
from gracetune.memory.arena_size import ArenaSize
from gracetune.memory.lookahead import BatchInFlight, InPlace
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.telemetry.events import (
    EVENTS,
    CheckpointWritten,
    EffectiveBatchChanged,
    Event,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    OverflowArenaChanged,
    Planned,
    Record,
    RequestServed,
    RunStarted,
    StageSwitched,
    StepDone,
    step_of,
)
from gracetune.telemetry.progress import RunStatus
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.logs import MEMORY_SECONDS, MemorySampling
from gracetune.train.run_requests import REQUESTS, RequestSource, create
from gracetune.train.view import View
from gracetune.units import GIB
from runs.launched import write_config
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import DUAL_EXPERT
from unit.hardware.machines import MACHINES, load
from unit.memory.conftest import Workshop, workshop  # noqa: F401 - a fixture
from unit.memory.test_lookahead import Clocked
from unit.memory.test_sensors import Card

STEPS = 10
NEEDED = {3: 60 * GIB, 4: 70 * GIB}
"""Peak memory of these steps; all others need 20 GiB."""
REQUESTED_AT = 7
"""After this step, a checkpoint is requested."""
WAITED_MS = (0.0, 50.0)
"""Milliseconds that the GPU waits for the first batch and for the batch of step 1; 0 for all others."""

Kind = TypeVar("Kind", bound=Event)


class ModelledCard(Card):
    """A GPU with 50 GiB of memory, and an overflow arena of 40 GiB."""

    def __init__(self) -> None:
        super().__init__(held_fraction=0.9, arena_reserved=40 * GIB)

    def work(self, size: int) -> None:
        """A step with many allocations, all freed at its end."""
        for _ in range(size // (10 * GIB)):
            self.allocate(10 * GIB)
        self.free(self.own + self.spilled)

    def close(self) -> None: ...


@dataclass
class Late:
    """A batch for which the GPU waited, measured by the GPU's clock."""

    moving: BatchInFlight
    waits_ms: Iterator[float]
    bytes: int = 0

    def arrive(self) -> tuple[Mapping[str, torch.Tensor], Clocked]:
        return self.moving.arrive()[0], Clocked(next(self.waits_ms), 100.0)

    def release(self) -> bool:
        return self.moving.release()


@dataclass(frozen=True)
class CollectedEvents:
    events: list[Event]
    screen: list[str]
    folder: Path
    card: ModelledCard

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def index(self, event: Event) -> int:
        return next(place for place, one in enumerate(self.events) if one is event)


@pytest.fixture(scope="module")
def collected(tiny_model: TinyModel, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> CollectedEvents:  # noqa: F811
    """`gracetune train CONFIG --log-level debug`: both experts, a ramp, samples, a held-out loss, checkpoints.

    There is no GPU, so its memory is modelled: the governor, the unified-memory layer on a fake driver, the guard, the
    look-ahead and everything above them are the run's own.
    """
    root = tmp_path_factory.mktemp("every-event")
    config = config_for(
        "wan", tiny_model, root,
        **DUAL_EXPERT | {
            "datasets": [
                {"id": "pictures", "path": str(images(root / "pictures")), "resolution": 64.0},
                {"id": "held", "path": str(images(root / "held", 1)), "resolution": 64.0, "dataset_type": "eval"},
            ],
            "training": DUAL_EXPERT["training"] | {"max_steps": STEPS},
            "objective": {"snr_gamma": 5.0},
            "validation": {
                "every_steps": STEPS, "loss_every_steps": STEPS, "steps": 1, "width": 64, "height": 64,
                "num_frames": 1, "prompts": [{"prompt": "one"}],
            },
            "checkpoints": {"every_steps": 5},
            "logging": {"every_steps": 5},
        },
    )  # fmt: skip
    file = write_config(config, root / "config.yaml")
    card, machine = ModelledCard(), load("gh200-numa")
    memory = UnifiedMemory(
        workshop.bench().uvm, machine, MemoryOptions(use_uvm=True),
        ArenaSize(card.arena_reserved, card.arena_reserved, "ratio", "modelled"),
        card, 0, cuda=card, host=HostSensor(machine.gpus, MACHINES / "gh200-numa"),
    )  # type: ignore[arg-type]  # fmt: skip
    original, start, waits = gracetune.train.loop.run_step, InPlace.start, chain(WAITED_MS, repeat(0.0))

    def run_step(job: Any) -> Any:
        done = original(job)
        card.work(NEEDED.get(job.position.step, 20 * GIB))
        if job.position.step == REQUESTED_AT:
            create(Path(config.output_dir), REQUESTS["save"], RequestSource.STUDIO)
        return done

    def late(mover: InPlace, batch: Any, *, ahead: bool = True) -> Late:
        return Late(start(mover, batch, ahead=ahead), waits)

    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gracetune.train.load.open_memory", lambda *_, **_more: memory)
        patch.setattr(gracetune.train.loop, "run_step", run_step)
        patch.setattr(InPlace, "start", late)
        patch.setattr("sys.stderr", screen)
        with pytest.raises(SystemExit) as ended:
            main(["train", str(file), "--log-level", "debug"])
    lines = screen.getvalue().splitlines()
    assert ended.value.code == 0, lines
    folder = Path(config.output_dir)
    log = read_log(folder / "logs" / "events.jsonl")
    assert log.unreadable == ()
    return CollectedEvents([record.event for record in log.records], lines, folder, card)


def test_every_event_of_the_schema_is_emitted(collected: CollectedEvents) -> None:
    assert {type(event) for event in collected.events} == set(EVENTS)


def test_the_plan_follows_the_start(collected: CollectedEvents) -> None:
    assert isinstance(collected.events[0], RunStarted)
    assert {"loading the model", "first batch, compiling"} < {
        part for part, seconds in collected.events[0].preparation_s.items() if seconds > 0
    }
    (plan,) = collected.of(Planned)
    assert collected.index(plan) == 1
    assert {line.tier for line in plan.lines} <= {tier.name for tier in plan.tiers}
    compute = plan.tiers[0]
    training = sum(line.bytes for line in plan.lines if line.tier == compute.name and "train" in line.phases)
    assert 0 < training <= compute.peak_bytes
    assert plan.summary


def test_a_requested_checkpoint_is_written_and_recorded(collected: CollectedEvents) -> None:
    (request,) = collected.of(RequestServed)
    assert (request.request, request.step, request.source) == ("save", REQUESTED_AT, "studio")
    assert [one.step for one in collected.of(CheckpointWritten)] == [5, REQUESTED_AT, 10]
    assert not (collected.folder / "save-now").exists()


def test_memory_events_come_when_they_happen_and_in_order(collected: CollectedEvents) -> None:
    """Steps 3 and 4 spill, between two log steps; the first calm sample is that of step 5."""
    memory_stages = [(one.step, one.before, one.after) for one in collected.of(MemoryStageChanged)]
    assert memory_stages == [(3, 1, 2), (7, 2, 1)]
    arena = [(one.step, one.before_bytes // GIB, one.after_bytes // GIB) for one in collected.of(OverflowArenaChanged)]
    assert arena == [(3, 0, 10), (4, 10, 20), (5, 20, 0)]
    light, hard = collected.of(MemoryReclaimed)
    assert (light.step, light.extent, light.reason) == (3, "light", "stage 1 -> 2: the overflow arena holds 10.0 GiB")
    assert (hard.step, hard.extent) == (4, "hard")
    assert hard.reason == "stage 2: the arena grew from 10.0 GiB to 20.0 GiB"
    assert (hard.released_bytes, hard.demoted_bytes) == (0, 0), "torch holds no GPU memory here"
    memory = (OverflowArenaChanged, MemoryStageChanged, MemoryReclaimed)
    of_step_3 = [type(event) for event in collected.events if isinstance(event, memory) and event.step == 3]
    assert of_step_3 == [*memory]


def test_the_look_ahead_reports_every_depth_with_its_reason(collected: CollectedEvents) -> None:
    changes = collected.of(LookAheadChanged)
    assert changes[0].before == 2
    assert all(one.after == following.before for one, following in pairwise(changes))
    assert "waited 50.00 ms" in changes[0].reason
    assert {one.reason for one in changes[1:]} == {"memory is tight"}
    assert [one.after for one in changes] == [3, 2, 1]


def test_experts_and_the_batch_change_before_the_step_they_are_about(collected: CollectedEvents) -> None:
    experts = [(one.step, one.before, one.after) for one in collected.of(StageSwitched)]
    high, low = "high_noise", "low_noise"
    assert experts == [(0, "", high), (2, high, low), (4, low, high), (6, high, low), (8, low, high)]
    assert "every 2 optimizer steps" in collected.of(StageSwitched)[1].reason
    batches = [(one.step, one.before, one.after, one.accumulation) for one in collected.of(EffectiveBatchChanged)]
    assert batches == [(0, None, 1, 1), (3, 1, 2, 1), (5, 2, 4, 2)]
    for event in (*collected.of(StageSwitched), *collected.of(EffectiveBatchChanged)):
        place = collected.index(event)
        steps = [(collected.index(done) < place, done.step <= event.step) for done in collected.of(StepDone)]
        assert all(before == earlier for before, earlier in steps), event


def test_the_screen_shows_the_ramp_and_the_memory_stage(collected: CollectedEvents) -> None:
    """The guides' two log lines appear as well, at their levels."""
    ramp = "GH200 gradient accumulation ramp enabled (initial=1, target=2, ramp_steps=6)"
    assert f"INFO: {ramp}" in collected.screen
    assert [line for line in collected.screen if line.startswith("DEBUG: ")] == [
        "DEBUG: GH200 ramp adjusted gradient_accumulation_steps -> 2"
    ]
    assert [line for line in collected.screen if "effective batch" in line] == [
        "step 3: effective batch 1 -> 2 (micro-batch 2 x accumulation 1)",
        "step 5: effective batch 2 -> 4 (micro-batch 2 x accumulation 2)",
    ]
    assert "step 3: memory stage 1 -> 2: the overflow arena holds 10.0 GiB" in collected.screen
    shown = [line for line in collected.screen if line.startswith(("step 5/", "step 10/"))]
    memory_stages = [next(part for part in line.split(" · ") if part.startswith("memory stage")) for line in shown]
    assert memory_stages == ["memory stage 2", "memory stage 1"]


def test_memory_is_sampled_where_it_changes(collected: CollectedEvents) -> None:
    """Memory is sampled at the first log step, and at the last one, because the memory stage has changed."""
    assert [sample.step for sample in collected.of(MemorySampled)] == [5, 10]


def test_memory_is_not_sampled_at_every_log_step(tmp_path: Path, tiny_model: TinyModel) -> None:
    """It is sampled at the first and last log step, and by time in between. The progress line always shows it."""
    screen: list[str] = []

    class Lines(View):
        def on_status(self, status: RunStatus) -> None:
            screen.append(status.line())

    config = config_for("sdxl", tiny_model, tmp_path)
    run(config, Lines())
    events = [record.event for record in read_log(tmp_path / "out" / "logs" / "events.jsonl").merged()]
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3, 4, 5]
    assert [event.step for event in events if isinstance(event, MemorySampled)] == [1, 5]
    assert all(" · host " in line for line in screen[1:])
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["logged"] | {"steps": 5, "memory": 2} == facts["logged"]

    sampling = MemorySampling()
    assert sampling.is_due(100.0)
    sampling.note_sample(1, 100.0)
    assert not sampling.is_due(100.0 + MEMORY_SECONDS - 0.1)
    assert sampling.is_due(100.0 + MEMORY_SECONDS)
    for event in events:
        sampling.note_sample(1, 100.0)
        sampling.write(Record(0.0, event))
        changes = isinstance(event, CheckpointWritten)
        assert sampling.is_due(100.0) == changes, event


def test_every_tier_of_known_size_has_its_capacity(collected: CollectedEvents) -> None:
    for sample in collected.of(MemorySampled):
        assert sample.capacity_bytes == {"host": probe().host.memory_limit, "arena": collected.card.arena_reserved}
        assert sample.used_bytes.keys() == {"host", "arena"}, "a run without a GPU"


def test_the_report_draws_them(collected: CollectedEvents) -> None:
    facts = json.loads((collected.folder / "report.json").read_text())
    for name, kind in (
        ("stage_transitions", StageSwitched),
        ("effective_batch_changes", EffectiveBatchChanged),
        ("memory_stage_changes", MemoryStageChanged),
        ("reclamations", MemoryReclaimed),
        ("arena_changes", OverflowArenaChanged),
        ("look_ahead_changes", LookAheadChanged),
    ):
        assert [one["step"] for one in facts[name]] == [step_of(event) for event in collected.of(kind)], name
    page = (collected.folder / "report.html").read_text()
    assert "Memory stage by step. memory stage: from 1 to 1, lowest 1, highest 2" in page
    assert "Effective batch, all processes by step. samples: from 1 to 4" in page
    assert "step 4: hard reclamation" in page
    assert "stage 2: the arena grew from 10.0 GiB to 20.0 GiB" in page
