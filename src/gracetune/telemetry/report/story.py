"""What a run did, gathered from its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from gracetune.telemetry.curves import Point, finite, smoothed
from gracetune.telemetry.events import (
    CheckpointWritten,
    EffectiveBatchChanged,
    Event,
    HeldOutLoss,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    OverflowArenaChanged,
    Record,
    RunEnded,
    RunStarted,
    SelfChecked,
    StageSwitched,
    StepDone,
    ValidationDone,
    Warned,
)
from gracetune.telemetry.progress import Progress
from gracetune.telemetry.schema import plain
from gracetune.telemetry.sinks.jsonl import Log

REPORT_FORMAT, REPORT_VERSION = "gracetune-report", 1
NO_END = "the log ends without an end of the run: it was killed, or is still running"

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Story:
    """The events that count, by kind and in order."""

    starts: tuple[RunStarted, ...]
    steps: tuple[StepDone, ...]
    switches: tuple[StageSwitched, ...]
    batch_changes: tuple[EffectiveBatchChanged, ...]
    memory_changes: tuple[MemoryStageChanged, ...]
    reclamations: tuple[MemoryReclaimed, ...]
    arena_changes: tuple[OverflowArenaChanged, ...]
    look_ahead: tuple[LookAheadChanged, ...]
    memory: tuple[MemorySampled, ...]
    checkpoints: tuple[CheckpointWritten, ...]
    validations: tuple[ValidationDone, ...]
    held_out: tuple[HeldOutLoss, ...]
    self_checks: tuple[SelfChecked, ...]
    warnings: tuple[Warned, ...]
    end: RunEnded | None
    began_s: float | None
    ended_s: float | None
    active_s: float
    """All processes together, lost work included."""
    seconds_per_step: float | None
    """Median, without warm-up."""
    unreadable: tuple[tuple[int, str], ...]

    @property
    def start(self) -> RunStarted:
        return self.starts[-1] if self.starts else RunStarted(run="")

    @property
    def outcome(self) -> str:
        return "unknown" if self.end is None else self.end.outcome

    @property
    def reason(self) -> str:
        return NO_END if self.end is None else self.end.reason

    @property
    def step(self) -> int:
        done = [event.step for event in self.steps[-1:]]
        done += [] if self.end is None else [self.end.step]
        return max([*done, self.start.resumed_step or 0])

    @property
    def stages(self) -> tuple[str, ...]:
        """Noise experts in the order they were first trained."""
        return tuple(dict.fromkeys(event.stage for event in self.steps))

    @property
    def memory_stages(self) -> tuple[Point, ...]:
        """Every change at its own step, and what was sampled at log steps."""
        sampled = [(one.step, one.counters["uvm.stage"]) for one in self.memory if "uvm.stage" in one.counters]
        return _in_order(sampled, self._changes(self.memory_changes))

    @property
    def look_ahead_depths(self) -> tuple[Point, ...]:
        return tuple(self._changes(self.look_ahead))

    def _changes(self, events: Sequence[MemoryStageChanged | LookAheadChanged]) -> list[Point]:
        """The value the run began with, and every later one at its step."""
        first = (self.starts[0].resumed_step or 0) if self.starts else 0
        begin = [(float(first), float(one.before)) for one in events[:1] if one.step > first]
        return [*begin, *((float(one.step), float(one.after)) for one in events)]

    @property
    def batches(self) -> tuple[Point, ...]:
        """Samples of an optimizer step, over all processes: the first step that had so many, and every log step."""
        world = self.start.world_size
        logged = [(one.step, float(one.micro_batch * one.accumulation * world)) for one in self.steps]
        changed = [(one.step + 1, float(one.after)) for one in self.batch_changes]
        return _in_order(changed, logged)

    def losses(self, stage: str | None = None) -> tuple[Point, ...]:
        return tuple((event.step, event.loss) for event in self.steps if stage is None or event.stage == stage)


def _in_order(*points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(sorted((point for some in points for point in some), key=lambda point: point[0]))


def tell(log: Log) -> Story:
    records = log.merged()
    events = [record.event for record in records]
    pace = Progress(recent=max(1, len(events)))
    for event in events:
        if not isinstance(event, RunStarted):  # those clear what was measured before
            pace.observe(event)
    ends = _of(events, RunEnded)
    return Story(
        starts=_of(events, RunStarted),
        steps=_of(events, StepDone),
        switches=_of(events, StageSwitched),
        batch_changes=_of(events, EffectiveBatchChanged),
        memory_changes=_of(events, MemoryStageChanged),
        reclamations=_of(events, MemoryReclaimed),
        arena_changes=_of(events, OverflowArenaChanged),
        look_ahead=_of(events, LookAheadChanged),
        memory=_of(events, MemorySampled),
        checkpoints=_of(events, CheckpointWritten),
        validations=_of(events, ValidationDone),
        held_out=_of(events, HeldOutLoss),
        self_checks=_of(events, SelfChecked),
        warnings=_of(events, Warned),
        end=ends[-1] if ends else None,
        began_s=records[0].time_s if records else None,
        ended_s=records[-1].time_s if records else None,
        active_s=_active(log.records),
        seconds_per_step=pace.standing().seconds_per_step,
        unreadable=log.unreadable,
    )


def _of(events: Iterable[Event], kind: type[Kind]) -> tuple[Kind, ...]:
    return tuple(event for event in events if isinstance(event, kind))


def _active(records: Sequence[Record]) -> float:
    """From each process's first event to its last."""
    total, first, last = 0.0, None, 0.0
    for record in records:
        if isinstance(record.event, RunStarted) or first is None:
            total += 0.0 if first is None else last - first
            first = record.time_s
        last = record.time_s
    return total + (0.0 if first is None else last - first)


# -- report.json ------------------------------------------------------------------------------------------------------


def summary(story: Story, how_to_load: dict[str, str], outputs: Sequence[str]) -> dict[str, Any]:
    """Everything the report says, as JSON."""
    start = story.start
    facts = {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "run": start.run,
        "outcome": story.outcome,
        "reason": story.reason,
        "began": moment(story.began_s),
        "ended": moment(story.ended_s),
        "active_s": story.active_s,
        "starts": len(story.starts),
        "step": story.step,
        "total_steps": start.total_steps,
        "samples": max((event.samples for event in story.steps), default=0),
        "epochs": max((event.epoch + 1 for event in story.steps), default=0),
        "loss": {stage or "all": loss_facts(story.losses(stage)) for stage in story.stages},
        "seconds_per_step": story.seconds_per_step,
        "data_wait_share": data_wait_share(story.steps),
        "compile_ms": sum(event.compile_ms for event in story.steps),
        "peak_bytes": peaks(story.memory),
        "capacity_bytes": dict(story.memory[-1].capacity_bytes) if story.memory else {},
        "counters": dict(story.memory[-1].counters) if story.memory else {},
        "unavailable": dict(story.memory[-1].unavailable) if story.memory else {},
        "stage_transitions": story.switches,
        "effective_batch_changes": story.batch_changes,
        "memory_stage_changes": story.memory_changes,
        "reclamations": story.reclamations,
        "arena_changes": story.arena_changes,
        "look_ahead_changes": story.look_ahead,
        "held_out": story.held_out,
        "self_checks": story.self_checks,
        "validations": story.validations,
        "checkpoints": story.checkpoints,
        "warnings": story.warnings,
        "steps": story.steps,
        "memory": story.memory,
        "outputs": outputs,
        "how_to_load": how_to_load,
        "machine": start.machine,
        "versions": start.versions,
        "config": start.config,
        "unreadable_lines": story.unreadable,
    }
    return {name: plain(value) for name, value in facts.items()}


def loss_facts(points: Sequence[Point]) -> dict[str, float | int | None]:
    known = finite(points)
    if not known:
        return {"first": None, "last": None, "lowest": None, "last_smoothed": None, "not_finite": len(points)}
    return {
        "first": known[0][1],
        "last": known[-1][1],
        "lowest": min(loss for _, loss in known),
        "last_smoothed": smoothed(points)[-1][1],
        "not_finite": len(points) - len(known),
    }


def data_wait_share(steps: Sequence[StepDone]) -> float | None:
    total = sum(event.step_ms * event.steps for event in steps)
    return sum(event.data_wait_ms * event.steps for event in steps) / total if total > 0 else None


def peaks(samples: Sequence[MemorySampled]) -> dict[str, dict[str, int]]:
    """Tier -> owner -> the most it held; `total` is the most all held together."""
    found: dict[str, dict[str, int]] = {}
    for sample in samples:
        for tier, owners in sample.used_bytes.items():
            known = found.setdefault(tier, {})
            for owner, used in (*owners.items(), ("total", sum(owners.values()))):
                known[owner] = max(known.get(owner, 0), used)
    return found


def moment(time_s: float | None) -> str | None:
    """ISO 8601, UTC."""
    if time_s is None:
        return None
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # a log may say anything
        return None
