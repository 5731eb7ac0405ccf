"""The training log: losses, learning rates and times at log steps, memory at some of them, changes when they happen.

Losses and norms are summed on the device, and a log step reads them once. Changes of the expert, the effective batch
and the look-ahead are known on the host, so reporting them does not synchronize.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune import __version__
from gracetune.cache.batches import BatchSource
from gracetune.config.environment import Environment
from gracetune.config.native import shareable
from gracetune.config.registry import tracker
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.hardware import Machine
from gracetune.memory.lookahead import Depth
from gracetune.memory.sensors import TorchCuda, usable_total
from gracetune.models.spec import ExpertName
from gracetune.optim.batch_ramp import Ramp, StepBatch
from gracetune.optim.build import state_tensors
from gracetune.optim.chunked_adamw import ChunkedAdamW
from gracetune.optim.element_rates import KeepsRates
from gracetune.redaction import Redactor
from gracetune.telemetry.dispatcher import Sink, Telemetry, TrackedRun, Tracker
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import (
    CheckpointWritten,
    EffectiveBatchChanged,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    OverflowArenaChanged,
    Planned,
    PlannedChange,
    PlannedMemory,
    PlannedTier,
    Record,
    RunStarted,
    StageSwitched,
    StepDone,
    ValidationDone,
)
from gracetune.telemetry.sinks.jsonl import JsonlSink
from gracetune.telemetry.sinks.webhook import WebhookSink
from gracetune.train.hooks import Callback, RunEnds, RunStarts, StepEnds, StepStarts
from gracetune.train.job import Pauses
from gracetune.train.live_progress import LiveProgress, validation_interval
from gracetune.train.output import RunFolder
from gracetune.train.planning import PlannedRun
from gracetune.train.preparation import PreparationTimes
from gracetune.train.runtime import Runtime
from gracetune.train.step import TrainStep
from gracetune.train.trained_model import TrainedModel
from gracetune.train.training_state import Position, TrainingState
from gracetune.train.view import View

EVENTS = "events.jsonl"
MEMORY_SECONDS = 30.0
"""Time between two memory samples if no event changes the memory."""
_CHANGES_MEMORY = (
    EffectiveBatchChanged, MemoryStageChanged, MemoryReclaimed, OverflowArenaChanged, LookAheadChanged,
    CheckpointWritten, ValidationDone,
)  # fmt: skip
_LOG = logging.getLogger("gracetune")
_COUNTED = ("uvm.", "cache.", "cuda_graph.")
"""Prefixes of the counters that a memory sample holds."""
_NO_LAYER = "the unified-memory layer is not open in this run"
_NO_FAULTS = "counted by CUPTI, and only where a run has an overflow arena (memory.use_uvm)"


@dataclass(frozen=True)
class SinkEntry:
    """A destination of events: whether a run wants it, how to open it, and a check before the run."""

    wanted: Callable[[RunConfig], bool]
    open: Callable[[RunConfig, RunFolder, View], Sink]
    check: Callable[[RunConfig], object] = lambda config: None
    """Called in preflight. Raises if a package is not installed or an address is invalid, for example."""


SINKS: tuple[SinkEntry, ...] = (
    SinkEntry(lambda config: True, lambda config, folder, view: JsonlSink(folder.logs / EVENTS, view.warn)),
    SinkEntry(
        lambda config: config.logging.webhook is not None,
        lambda config, folder, view: WebhookSink(config.logging.webhook or ""),
        lambda config: WebhookSink(config.logging.webhook or ""),
    ),
)
"""The event log of every run, and the webhook. Trackers are found by name (`config/registry.py`)."""


def sinks_of(config: RunConfig) -> tuple[SinkEntry, ...]:
    """The sinks that this run wants, trackers included."""
    trackers = (_tracker_entry(tracker(name)) for name in dict.fromkeys(config.logging.trackers))
    return (*(entry for entry in SINKS if entry.wanted(config)), *trackers)


def _tracker_entry(found: Tracker) -> SinkEntry:
    return SinkEntry(
        lambda config: True,
        lambda config, folder, view: found.open(TrackedRun(config.logging.project, folder.path, folder.logs)),
        lambda config: found.check(),
    )


def open_telemetry(
    config: RunConfig, folder: RunFolder, view: View, environment: Environment, *, is_main: bool
) -> Telemetry:
    """Open the sinks on rank 0; other ranks emit nothing. Secrets of the config and the environment are redacted."""
    if not is_main:
        return Telemetry()
    try:
        sinks = [entry.open(config, folder, view) for entry in sinks_of(config)]
    except TelemetryError as error:
        raise GracetuneError(str(error)) from error
    redactor = Redactor(config.model_dump(mode="json"), environment.variables)
    return Telemetry(sinks, report=view.warn, redactor=redactor)


class MemorySampling:
    """Decides at which log steps memory is sampled. It is a sink, so that it sees events that change the memory.

    Memory is sampled at the first log step of a process, at the first one after a change, every `MEMORY_SECONDS`, and
    at the end. Sampling at every log step would triple the log's size with mostly equal values.
    """

    name = "the sampling of memory"

    def __init__(self) -> None:
        self._changed = True
        self._seconds = 0.0
        self.step: int | None = None
        """The step of the last sample."""

    def write(self, record: Record) -> None:
        self._changed = self._changed or isinstance(record.event, _CHANGES_MEMORY)

    def close(self) -> None: ...

    def is_due(self, seconds: float) -> bool:
        return self._changed or seconds - self._seconds >= MEMORY_SECONDS

    def note_change(self) -> None:
        self._changed = True

    def note_sample(self, step: int, seconds: float) -> None:
        self._changed, self._seconds, self.step = False, seconds, step


@dataclass
class _Sums:
    """Sums over one expert's steps since the last log step. Tensors stay on the device."""

    loss: Tensor
    norm: Tensor
    steps: int = 0
    samples: int = 0
    """Of all ranks; `loss` is of this rank only."""
    last: StepEnds | None = None


@dataclass(kw_only=True)
class TrainingLog(Callback):
    """Emits the events of training, and updates the progress line."""

    telemetry: Telemetry
    config: RunConfig
    machine: Machine
    view: View
    runtime: Runtime
    usage: MemoryUsage
    state: TrainingState
    source: BatchSource
    ramp: Ramp
    pauses: Pauses
    model: str
    """The weights, as the user names them."""
    trained: tuple[ExpertName, ...]
    resumed: int | None
    """The step of the checkpoint that the run resumes from; None for a new run."""
    planned: PlannedRun
    preparation: PreparationTimes
    first_ms: float
    """How much longer the first pass took than the second, mostly for compiling."""
    clock: Callable[[], float] = time.perf_counter
    sampling: MemorySampling = field(default_factory=MemorySampling)
    _steps: int = 0
    """Length of the whole run."""
    _sums: dict[ExpertName, _Sums] = field(default_factory=dict)
    _since: float = 0.0
    _waited_ms: float = 0.0
    _paused: float = 0.0
    """Clock, total wait for data and total pauses after the last log step."""
    _expert: ExpertName | None = None
    _already_trained: set[ExpertName] = field(default_factory=set)
    """Experts trained since this process began."""
    _step_batch: StepBatch | None = None
    _live: LiveProgress | None = None
    """None on ranks that show nothing."""

    def start(self, begun: RunStarts) -> None:
        self._steps = begun.steps
        software = self.machine.software
        versions = {name: version for name, version in software.libraries.items() if version is not None}
        if self.runtime.is_main:
            self._live = LiveProgress(
                self.view, self.usage.totals, self.pauses, self.clock, validate_every=validation_interval(self.config)
            )
            self.telemetry.add(self._live)
        self.telemetry.emit(
            RunStarted(
                run=self.config.name,
                resumed_step=self.resumed,
                total_steps=begun.steps,
                world_size=self.runtime.world_size,
                family=self.config.model.family,
                model=self.model,
                adapter=self.config.adapter.kind,
                adapter_format=self.config.checkpoints.format,
                machine=_machine_in_words(self.machine),
                versions={
                    "gracetune": __version__,
                    "python": software.python or "",
                    "torch": software.torch or "",
                    **versions,
                },
                config=shareable(self.config),
                preparation_s=self.preparation.seconds(),
            )
        )
        self.telemetry.emit(planned_event(self.planned))
        self.view.record_with(self.telemetry.warn)
        self.source.on_depth(self._depth_changes)
        self.telemetry.add(self.sampling)
        self._begin_interval()

    def step_starts(self, coming: StepStarts) -> None:
        step, expert, step_batch = coming.position.step, coming.expert, coming.step_batch
        if expert != self._expert and len(self.trained) > 1:
            turns = f"experts take turns every {self.config.model.switch_experts_every} optimizer steps"
            reason = turns if self._expert is not None else f"this process begins with it; {turns}"
            self.telemetry.emit(StageSwitched(step=step, before=self._expert or "", after=expert, reason=reason))
        if step_batch != self._step_batch and self.ramp.ramp_steps:
            self._batch_changes(coming.position, self._step_batch, step_batch)
        if expert not in self._already_trained:  # its first step allocates its optimizer state
            self._already_trained.add(expert)
            self.sampling.note_change()
        self._expert, self._step_batch = expert, step_batch

    def step_ends(self, done: StepEnds) -> None:
        sums = self._sums.get(done.expert)
        if sums is None:
            sums = self._sums[done.expert] = _Sums(torch.zeros_like(done.loss), torch.zeros_like(done.norm))
        sums.loss += done.loss
        sums.norm += done.norm
        sums.steps, sums.samples, sums.last = sums.steps + 1, sums.samples + done.samples, done
        self.view.on_step(done.step, self._steps)
        logged = done.step % self.config.logging.every_steps == 0
        if logged:
            self._emit_steps(self.state.position)
        if self._live is not None:
            ranks = self.runtime.world_size  # the loss is of one rank, the samples are of all
            self._live.step_ends(
                done.step, done.expert, lambda: ranks * sums.loss.detach() / sums.samples, logged=logged
            )

    def end(self, ended: RunEnds) -> None:
        self.sampling.note_change()
        if self._sums:
            self._emit_steps(ended.position)
        elif self.sampling.step not in (None, ended.position.step):
            self._sample_memory(ended.position.step)
        if self._live is not None:
            self._live.end(ended.position.step)

    def _sample_memory(self, step: int) -> None:
        self.telemetry.emit(self.usage.event(step))
        self.sampling.note_sample(step, self.clock())

    def _batch_changes(self, position: Position, before: StepBatch | None, after: StepBatch) -> None:
        world = self.runtime.world_size
        event = EffectiveBatchChanged(
            step=position.step,
            before=None if before is None else before.samples * world,
            after=after.samples * world,
            micro_batch=after.micro_batch,
            accumulation=after.accumulation,
            reason=f"the batch ramp after {position.micro_batches} of {self.ramp.ramp_steps} micro-batches",
        )
        self.telemetry.emit(event)
        if before is None:  # the ramp's start and end are reported when the run begins
            return
        parts = f"micro-batch {after.micro_batch} x accumulation {after.accumulation}"
        parts += f" x {world} processes" if world > 1 else ""
        self.view.report(f"step {position.step}: effective batch {event.before} -> {event.after} ({parts})")
        if after.accumulation != before.accumulation:
            _LOG.debug("GH200 ramp adjusted gradient_accumulation_steps -> %d", after.accumulation)

    def _depth_changes(self, before: Depth, after: Depth) -> None:
        step = self.state.position.step
        self.telemetry.emit(LookAheadChanged(step=step, before=before.value, after=after.value, reason=after.reason))

    def _emit_steps(self, position: Position) -> None:
        values = torch.stack([value for sums in self._sums.values() for value in (sums.loss, sums.norm.to(sums.loss))])
        losses = values[0::2].clone()
        self.runtime.sum_(losses)
        read = torch.stack([losses, values[1::2]]).tolist()  # the only synchronization of a log step
        waited = self.source.stats.wait_ms
        spent = self.clock() - self._since - (self.pauses.seconds - self._paused)
        count = sum(sums.steps for sums in self._sums.values())
        step_ms, wait_ms = 1000 * max(0.0, spent) / count, (waited - self._waited_ms) / count
        rates = learning_rates(self.state.optimizer)
        if self.sampling.is_due(self.clock()):
            self._sample_memory(position.step)  # before `StepDone`, so that the progress line shows it
        for (expert, sums), loss, norm in zip(self._sums.items(), *read, strict=True):
            assert sums.last is not None, "a step was added"
            self.telemetry.emit(
                StepDone(
                    step=position.step,
                    epoch=position.epoch,
                    loss=loss / sums.samples,
                    step_ms=step_ms,
                    steps=sums.steps,
                    stage=expert,
                    lr=rates,
                    grad_norm=norm / sums.steps,
                    samples=position.samples,
                    data_wait_ms=wait_ms,
                    compile_ms=self.first_ms,
                    micro_batch=sums.last.step_batch.micro_batch,
                    accumulation=sums.last.step_batch.accumulation,
                )
            )
            self.first_ms = 0.0
        self._sums = {}
        self._begin_interval()  # so that the time of logging does not count as step time

    def _begin_interval(self) -> None:
        self._since, self._waited_ms, self._paused = self.clock(), self.source.stats.wait_ms, self.pauses.seconds


def planned_event(planned: PlannedRun) -> Planned:
    """The memory plan as an event."""
    plan = planned.plan
    return Planned(
        verdict=plan.verdict,
        summary=plan.summary,
        tiers=tuple(
            PlannedTier(
                name=use.tier.name, label=use.tier.label, capacity_bytes=use.tier.capacity,
                budget_bytes=use.tier.budget, peak_bytes=use.peak, why=use.tier.why,
            )
            for use in plan.tiers
        ),
        lines=tuple(
            PlannedMemory(
                owner=line.name, tier=line.tier, bytes=line.bytes, phases=line.phases, why=line.why, role=line.role
            )
            for line in plan.lines
        ),
        changes=tuple(
            PlannedChange(
                key=change.key, before=change.before, after=change.after, saves_bytes=change.saves, why=change.why,
                automatic=change.automatic,
            )
            for change in plan.changes
        ),
        mismatch=planned.mismatch or "",
    )  # fmt: skip


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The learning rate of each parameter group; the mean if every element has its own rate."""
    kept: Optimizer | KeepsRates = optimizer
    if isinstance(kept, KeepsRates):
        return {name or "all": float(rate) for name, rate in kept.learning_rates().items()}
    return {group.get("name") or "all": float(group["lr"]) for group in optimizer.param_groups}


@dataclass(frozen=True, eq=False)
class MemoryUsage:
    """Current memory use, by tier and owner. What has no known owner is `other`.

    torch counts memory in the overflow arena as device memory; here the arena is a separate tier.
    """

    machine: Machine
    device: torch.device
    trained_model: TrainedModel
    optimizer: Optimizer
    source: BatchSource
    train_step: TrainStep

    def totals(self) -> dict[str, int]:
        """Bytes of this process in host memory, and on its GPU by torch's counters. Does not synchronize."""
        used = {} if self.device.type != "cuda" else {"device": torch.cuda.memory_allocated(self.device)}
        return {**used, "host": psutil.Process().memory_info().rss}

    def event(self, step: int) -> MemorySampled:
        host = self.trained_model.host
        trained = sum(_bytes(one) for one in self.trained_model.parameters().values())
        frozen = sum(
            _bytes(one) for name in self.trained_model.trained for one in host.module(name).parameters()
            if not one.requires_grad
        )  # fmt: skip
        known = {"frozen weights": frozen, "trained weights": trained, "gradients": trained, "optimizer state": 0}
        beside = {}
        if isinstance(self.optimizer, ChunkedAdamW):
            known["gradients"] = sum(_bytes(one) for sums in self.optimizer.sums for one in sums.sums)
            known["optimizer state"] = self.optimizer.device_bytes
            beside = {"optimizer state": self.optimizer.host_bytes}
        else:
            known["optimizer state"] = sum(_bytes(one) for one in state_tensors(self.optimizer))
        stats = {**self.source.all_stats(), **self.train_step.counters}
        counters = {name: float(value) for name, value in stats.items() if name.startswith(_COUNTED)}
        arena, spilled = (int(counters.get(f"uvm.arena_{what}_bytes", 0)) for what in ("reserved", "active"))
        process = psutil.Process().memory_info().rss
        used: dict[str, dict[str, int]] = {"host": {"process": process}}
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device) - spilled
            used["device"] = {**known, "other": max(0, allocated - sum(known.values()))}
            if in_host := sum(beside.values()):
                used["host"] = {**beside, "process": max(0, process - in_host)}
        else:
            known["optimizer state"] += sum(beside.values())
            used["host"] = {**known, "other": max(0, process - sum(known.values()))}
        if arena:
            used["arena"] = {"spilled": spilled}
        counters["host.major_page_faults"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)
        absent = {"uvm.stage": _NO_LAYER, "uvm.gpu_page_faults": _NO_FAULTS, "uvm.migrated_to_device_bytes": _NO_FAULTS}
        return MemorySampled(
            step=step,
            used_bytes=used,
            capacity_bytes=_capacities(self.device, self.machine, arena),
            counters=counters,
            unavailable={name: why for name, why in absent.items() if name not in counters},
        )


def _capacities(device: torch.device, machine: Machine, arena: int) -> dict[str, int]:
    """The size of every tier, as far as it is known."""
    found: dict[str, int] = {}
    if device.type == "cuda":
        cuda = TorchCuda(device.index or 0)
        found["device"] = usable_total(cuda.info()[1], cuda.fraction(), arena)
    if machine.host.memory_limit is not None:
        found["host"] = machine.host.memory_limit
    if arena:
        found["arena"] = arena
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _machine_in_words(machine: Machine) -> str:
    gpus = ", ".join(gpu.name or "an unnamed GPU" for gpu in machine.gpus) or "no GPU"
    return f"{gpus}; {machine.host.cpu_count or 'an unknown number of'} CPUs; {machine.profile.value}"
