"""The history of a run, built from its event log line by line, and its form as report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from gracetune.telemetry.curves import Point, evenly_spaced_indices, finite_points, moving_average
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
    Planned,
    Record,
    RequestServed,
    RunEnded,
    RunStarted,
    SelfChecked,
    StageSwitched,
    StepDone,
    ValidationDone,
    Warned,
)
from gracetune.telemetry.progress import ProgressTracker
from gracetune.telemetry.report.columns import MemoryColumns, StepColumns
from gracetune.telemetry.schema import plain
from gracetune.telemetry.sinks.jsonl import LogReader

REPORT_FORMAT, REPORT_VERSION = "gracetune-report", 2
MOST_LISTED: Final = 2000
"""Maximum number of events of each other kind in report.json; evenly spaced ones are listed if there are more."""
NO_END = "the log ends without an end of the run: its process was killed, or is still running"
STILL_RUNNING = "this report shows the run up to its last event"

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class RunHistory:
    """The valid events of a run, by kind and in order."""

    starts: tuple[RunStarted, ...]
    steps: StepColumns
    kept_steps: tuple[StepDone, ...]
    """The step events that report.json lists."""
    switches: tuple[StageSwitched, ...]
    batch_changes: tuple[EffectiveBatchChanged, ...]
    memory_changes: tuple[MemoryStageChanged, ...]
    reclamations: tuple[MemoryReclaimed, ...]
    arena_changes: tuple[OverflowArenaChanged, ...]
    look_ahead: tuple[LookAheadChanged, ...]
    memory: MemoryColumns
    kept_memory: tuple[MemorySampled, ...]
    """The memory events that are plotted and listed in report.json, always including the first and the last."""
    checkpoints: tuple[CheckpointWritten, ...]
    validations: tuple[ValidationDone, ...]
    held_out: tuple[HeldOutLoss, ...]
    self_checks: tuple[SelfChecked, ...]
    requests: tuple[RequestServed, ...]
    warnings: tuple[Warned, ...]
    plan: Planned | None
    """The memory plan of the last process."""
    end: RunEnded | None
    began_s: float | None
    """Time of the first valid event, in seconds since 1970; None if there is none."""
    ended_s: float | None
    """Time of the last valid event, whatever it is."""
    process_began_s: float
    """When the last process began; 0 if no process has."""
    active_s: float
    """Running time of all processes in sequence, including work that was lost."""
    seconds_per_step: float | None
    """Median without the warm-up steps."""
    unreadable: tuple[tuple[int, str], ...]
    """Lines of the log that are not events: line number and reason."""
    running: bool = False
    """Whether a process still trains in the run's folder."""

    @property
    def start(self) -> RunStarted:
        return self.starts[-1] if self.starts else RunStarted(run="")

    @property
    def outcome(self) -> str:
        if self.end is None:
            return "running" if self.running else "unknown"
        return self.end.outcome

    @property
    def reason(self) -> str:
        if self.end is None:
            return STILL_RUNNING if self.running else NO_END
        return self.end.reason

    @property
    def step(self) -> int:
        """Optimizer steps done, according to the log."""
        done = [] if self.steps.last is None else [self.steps.last.step]
        done += [] if self.end is None else [self.end.step]
        return max([*done, self.start.resumed_step or 0])

    @property
    def experts(self) -> tuple[str, ...]:
        """Experts in the order in which they were first trained."""
        return self.steps.experts

    @property
    def memory_stages(self) -> tuple[Point, ...]:
        """The memory stage over time: every change at its step, and every sampled value."""
        sampled = [(one.step, one.counters["uvm.stage"]) for one in self.kept_memory if "uvm.stage" in one.counters]
        return _in_order(sampled, self._changes(self.memory_changes))

    @property
    def look_ahead_depths(self) -> tuple[Point, ...]:
        return tuple(self._changes(self.look_ahead))

    def _changes(self, events: Sequence[MemoryStageChanged | LookAheadChanged]) -> list[Point]:
        """The initial value, and every later value at its step."""
        first = (self.starts[0].resumed_step or 0) if self.starts else 0
        begin = [(float(first), float(one.before)) for one in events[:1] if one.step > first]
        return [*begin, *((float(one.step), float(one.after)) for one in events)]

    @property
    def batches(self) -> tuple[Point, ...]:
        """Samples of an optimizer step over all processes: at every log step and at each first step of a new size."""
        world = self.start.world_size
        logged = [(step, size * world) for step, size in self.steps.batches]
        changed = [(one.step + 1, float(one.after)) for one in self.batch_changes]
        return _in_order(changed, logged)


def _in_order(*points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(sorted((point for some in points for point in some), key=lambda point: point[0]))


class _Gathered:
    """Accumulates the lines of a log."""

    def __init__(self) -> None:
        self.steps, self.memory = StepColumns(), MemoryColumns()
        self.others: dict[type[Event], list[Event]] = {}
        self.pace = ProgressTracker(recent=None)
        self.began_s: float | None = None
        self.ended_s: float | None = None
        self._active = 0.0
        self._process: tuple[float, float] | None = None
        """Times of the first and the last event of the current process."""

    def of(self, kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(event for event in self.others.get(kind, []) if isinstance(event, kind))

    def add(self, begin: int, record: Record, *, is_valid: bool) -> None:
        event, now = record.event, record.time_s
        if isinstance(event, RunStarted) or self._process is None:
            self._active = self.active_s
            self._process = (now, now)
        self._process = (self._process[0], now)
        if not is_valid:
            return
        self.began_s = now if self.began_s is None else self.began_s
        self.ended_s = now
        if not isinstance(event, RunStarted):  # a RunStarted would clear the pace of earlier processes
            self.pace.observe(event)
        if isinstance(event, StepDone):
            self.steps.add(begin, event)
        elif isinstance(event, MemorySampled):
            self.memory.add(begin, event)
        else:
            self.others.setdefault(type(event), []).append(event)

    @property
    def process_began_s(self) -> float:
        return 0.0 if self._process is None else self._process[0]

    @property
    def active_s(self) -> float:
        """The time from each process's first event to its last, added up."""
        return self._active + (0.0 if self._process is None else self._process[1] - self._process[0])


def read_history(log: LogReader, *, running: bool = False) -> RunHistory:
    found, unreadable = _Gathered(), []
    for line in log.lines():
        if line.record is None:
            unreadable.append((line.number, line.why))
        else:
            found.add(line.begin, line.record, is_valid=line.is_valid)
    ends, plans = found.of(RunEnded), found.of(Planned)
    kept_steps = [record.event for record in log.at(found.steps.kept())]
    kept_memory = [record.event for record in log.at(found.memory.kept())]
    return RunHistory(
        starts=found.of(RunStarted),
        steps=found.steps,
        kept_steps=tuple(event for event in kept_steps if isinstance(event, StepDone)),
        switches=found.of(StageSwitched),
        batch_changes=found.of(EffectiveBatchChanged),
        memory_changes=found.of(MemoryStageChanged),
        reclamations=found.of(MemoryReclaimed),
        arena_changes=found.of(OverflowArenaChanged),
        look_ahead=found.of(LookAheadChanged),
        memory=found.memory,
        kept_memory=tuple(event for event in kept_memory if isinstance(event, MemorySampled)),
        checkpoints=found.of(CheckpointWritten),
        validations=found.of(ValidationDone),
        held_out=found.of(HeldOutLoss),
        self_checks=found.of(SelfChecked),
        requests=found.of(RequestServed),
        warnings=found.of(Warned),
        plan=plans[-1] if plans else None,
        end=ends[-1] if ends else None,
        began_s=found.began_s,
        ended_s=found.ended_s,
        process_began_s=found.process_began_s,
        active_s=found.active_s,
        seconds_per_step=found.pace.status().seconds_per_step,
        unreadable=tuple(unreadable),
        running=running,
    )


# -- report.json ------------------------------------------------------------------------------------------------------


def summary(history: RunHistory, how_to_load: dict[str, str], outputs: Sequence[str]) -> dict[str, Any]:
    """The content of the report as JSON. Lists may be shortened: `logged` has the number of events of each kind."""
    start, last = history.start, history.kept_memory[-1] if history.kept_memory else None
    lists: dict[str, Sequence[Any]] = {
        "stage_transitions": history.switches,
        "effective_batch_changes": history.batch_changes,
        "memory_stage_changes": history.memory_changes,
        "reclamations": history.reclamations,
        "arena_changes": history.arena_changes,
        "look_ahead_changes": history.look_ahead,
        "held_out": history.held_out,
        "self_checks": history.self_checks,
        "validations": history.validations,
        "checkpoints": history.checkpoints,
        "requests": history.requests,
        "warnings": history.warnings,
        "unreadable_lines": history.unreadable,
    }
    facts = {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "run": start.run,
        "outcome": history.outcome,
        "reason": history.reason,
        "began": moment(history.began_s),
        "ended": moment(history.ended_s),
        "active_s": history.active_s,
        "starts": len(history.starts),
        "step": history.step,
        "total_steps": start.total_steps,
        "samples": history.steps.samples,
        "epochs": history.steps.epochs,
        "loss": {expert or "all": loss_facts(history.steps.losses(expert)) for expert in history.experts},
        "seconds_per_step": history.seconds_per_step,
        "data_wait_share": history.steps.data_wait_share,
        "compile_ms": history.steps.compile_ms,
        "peak_bytes": history.memory.peaks,
        "capacity_bytes": {} if last is None else last.capacity_bytes,
        "counters": {} if last is None else last.counters,
        "unavailable": {} if last is None else last.unavailable,
        "plan": history.plan,
        "logged": {
            "steps": len(history.steps),
            "memory": len(history.memory),
            **{name: len(events) for name, events in lists.items()},
        },
        **{
            name: [events[index] for index in evenly_spaced_indices(len(events), MOST_LISTED)]
            for name, events in lists.items()
        },
        "steps": history.kept_steps,
        "memory": history.kept_memory,
        "outputs": outputs,
        "how_to_load": how_to_load,
        "machine": start.machine,
        "versions": start.versions,
        "config": start.config,
    }
    return {name: plain(value) for name, value in facts.items()}


def loss_facts(points: Sequence[Point]) -> dict[str, float | int | None]:
    known = finite_points(points)
    if not known:
        return {"first": None, "last": None, "lowest": None, "last_smoothed": None, "not_finite": len(points)}
    return {
        "first": known[0][1],
        "last": known[-1][1],
        "lowest": min(loss for _, loss in known),
        "last_smoothed": moving_average(points)[-1][1],
        "not_finite": len(points) - len(known),
    }


def moment(time_s: float | None) -> str | None:
    """A time as ISO 8601 in UTC."""
    if time_s is None:
        return None
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # a damaged log may hold any number
        return None
