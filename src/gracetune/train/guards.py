"""Guards that stop a run in time: non-finite gradients, and memory that runs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.data.refs import BatchRef
from gracetune.errors import MachineError
from gracetune.hardware import Machine
from gracetune.hardware.allocation import host_floor, host_reserve
from gracetune.hostmem.sensors import HostSensor
from gracetune.memory.errors import MemoryPressure
from gracetune.memory.governor import Action, ArenaChange, MemoryChange, MemoryStageChange
from gracetune.memory.sensors import ArenaUsage, Sensors
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.memory.watchdog import Floors, Watchdog
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.events import Event, MemoryReclaimed, MemoryStageChanged, OverflowArenaChanged
from gracetune.train.control import Control, Stop
from gracetune.train.hooks import Callback, RunStarts, StepEnds
from gracetune.train.training_state import Position, ResumePoint, TrainingState
from gracetune.train.view import View
from gracetune.units import format_bytes

_SHOWN = 8
"""Files that a message names."""
_UNKNOWN = 1 << 62
"""Stands for an unknown amount of free memory: no limit applies."""
_MOST_SKIPPED = 40
"""Skipped steps in a row that end an fp16 run. After so many halvings the loss scale is too small for an overflow."""


@dataclass(frozen=True, eq=False)
class _Norm:
    """A step's gradient norm that is being copied to the host."""

    step: int
    value: Tensor
    arrived: torch.cuda.Event | None
    """Recorded after the copy; None on a CPU."""
    batches: tuple[BatchRef, ...]
    before: ResumePoint
    """Where the run was before this step."""

    @property
    def is_ready(self) -> bool:
        return self.arrived is None or self.arrived.query()


class NanGuard(Callback):
    """Ends a run with non-finite gradients, and names their batch.

    The host never waits for the GPU; it checks the norms that have arrived. The device has skipped the failed step and
    all later ones (`TrainingState.take_step`), so the run rewinds to the position before the failed step and saves
    that. In fp16 such gradients are ordinary and lower the loss scale; only many in a row end the run, and it is not
    rewound.
    """

    def __init__(self, state: TrainingState, control: Control) -> None:
        self._state, self._control = state, control
        self._pending: deque[_Norm] = deque()
        self._resume_point = state.resume_point()
        self._skipped = 0
        self._failure: Stop | None = None
        self._before: ResumePoint | None = None
        """Where the run was before the step that failed."""

    def start(self, begun: RunStarts) -> None:
        self._resume_point = self._state.resume_point()

    def step_ends(self, done: StepEnds) -> None:
        self._pending.append(_copy_to_host(done, self._resume_point))
        self._resume_point = self._state.resume_point()
        while self._pending and self._pending[0].is_ready:
            self._judge(self._pending.popleft())

    def settle(self) -> Stop | None:
        """Wait until the gradients of all steps are checked. A failed run is rewound to before the failed step."""
        while self._pending:
            norm = self._pending.popleft()
            if norm.arrived is not None:
                norm.arrived.synchronize()
            self._judge(norm)
        if self._before is not None:  # norms are equal on all ranks, so all of them rewind to the same step
            self._state.go_back(self._before)
        return self._failure

    def _judge(self, norm: _Norm) -> None:
        """Check one step's norm. Steps after the first failure are ignored, because they changed nothing."""
        good, skips = bool(norm.value.isfinite()), self._state.scale.skips
        self._skipped = 0 if good else self._skipped + 1
        if good or self._failure is not None or (skips and self._skipped < _MOST_SKIPPED):
            return
        self._before = None if skips else norm.before
        saved = (self._before or self._state.resume_point()).position.step
        self._failure = Stop("failed", _failure_reason(norm, self._skipped, saved))
        self._control.ask_to_stop(self._failure.kind, self._failure.reason)


def _failure_reason(norm: _Norm, steps: int, saved: int) -> str:
    files = [f"{sample.path} of {sample.dataset}" for batch in norm.batches for sample in batch.samples]
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    which = f"step {norm.step}" if steps == 1 else f"{steps} steps in a row, the last of them {norm.step},"
    kept = f", and saved at step {saved}" if saved else "; nothing was learned yet, so nothing is saved"
    return (
        f"the gradients of {which} are not finite; its batch: {', '.join(files[:_SHOWN])}{more}. Weights and optimizer "
        f"are as they were before{kept}. Look at these files; a lower optimizer.lr or "
        "--set training.mixed_precision=fp32 helps where it is not the data"
    )


def _copy_to_host(done: StepEnds, before: ResumePoint) -> _Norm:
    """Start an asynchronous copy of the norm into pinned memory."""
    batches = tuple(done.batches)
    if done.norm.device.type != "cuda":
        return _Norm(done.step, done.norm, None, batches, before)
    value = torch.empty((), pin_memory=True)
    value.copy_(done.norm, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Norm(done.step, value, arrived, batches, before)


def host_room(machine: Machine, memory: UnifiedMemory | None) -> Callable[[], int]:
    """A function that returns how much host memory may still be used; 0 if unknown."""
    sensors, reserve = _sensors(machine, memory), host_reserve(machine)
    return lambda: max(0, (sensors.vitals().host_headroom or 0) - reserve)


def _sensors(machine: Machine, memory: UnifiedMemory | None) -> Sensors:
    return memory.sensors if memory is not None else Sensors(HostSensor(machine.gpus), None, _NoArena())


def check_memory(machine: Machine, headroom: int | None) -> None:
    """Reject a run that the watchdog would stop before its first step. `headroom` is the free host memory."""
    floor = host_floor(machine)
    if headroom is None or headroom >= floor:
        return
    total = "" if machine.host.memory_limit is None else f" of {format_bytes(machine.host.memory_limit)}"
    raise MachineError(
        f"{format_bytes(headroom)}{total} of main memory left, the floor is {format_bytes(floor)}: the run would stop "
        "before its first step. Free memory (`free -h`, `ps aux --sort -rss`) or give the container more; then start "
        "again"
    )


def memory_left(machine: Machine, memory: UnifiedMemory | None) -> int:
    """Free host memory; a very large number if unknown."""
    headroom = _sensors(machine, memory).vitals().host_headroom
    return _UNKNOWN if headroom is None else headroom


def watch(machine: Machine, memory: UnifiedMemory | None, view: View) -> Watchdog:
    """A watchdog that checks host memory every second. Below the floor, half of the reserve, the run is saved
    and stopped."""
    sensors = _sensors(machine, memory)
    floors = Floors(host=host_floor(machine))
    return Watchdog(sensors.vitals, floors, report=lambda event: view.warn(f"memory watchdog: {event.text}"))


@dataclass(frozen=True)
class _NoArena:
    def usage(self) -> ArenaUsage:
        return ArenaUsage(0, 0)


def memory_alarm(watchdog: Watchdog) -> Callable[[], str | None]:
    """A function for `TrainingJob.memory_alarm`: returns why the run has to be saved now, or None."""

    def alarm() -> str | None:
        stop_request = watchdog.requested()
        return None if stop_request is None else f"memory: {stop_request.reason}"

    return alarm


class MemoryGuard(Callback):
    """Runs the memory governor after every optimizer step. `memory_alarm` reads the watchdog before every micro-batch.

    Every change by the governor is an event at once, independent of log steps. A change of the memory stage is also
    shown as a line.
    """

    def __init__(
        self, memory: UnifiedMemory | None, position: Position, control: Control, telemetry: Telemetry, view: View
    ) -> None:
        self._memory, self._position, self._control = memory, position, control
        self._telemetry, self._view = telemetry, view

    def start(self, begun: RunStarts) -> None:
        if self._memory is not None:
            self._memory.on_change(lambda change: self._report(self._position.step, change))

    def _report(self, step: int, change: MemoryChange) -> None:
        if isinstance(change, MemoryStageChange):
            self._view.report(f"step {step}: memory {change.reason}")
        self._telemetry.emit(memory_change_event(step, change))

    def step_ends(self, done: StepEnds) -> None:
        if self._memory is not None:
            try:
                self._memory.step()
            except MemoryPressure as pressure:
                self._control.ask_to_stop("interrupted", str(pressure))


def memory_change_event(step: int, change: MemoryChange) -> Event:
    if isinstance(change, MemoryStageChange):
        return MemoryStageChanged(step=step, before=change.before, after=change.after, reason=change.reason)
    if isinstance(change, ArenaChange):
        return OverflowArenaChanged(
            step=step, before_bytes=change.before, after_bytes=change.after, reason=change.reason
        )
    return MemoryReclaimed(
        step=step,
        extent="hard" if change.action is Action.HARD_RECLAMATION else "light",
        released_bytes=change.released,
        demoted_bytes=change.demoted,
        duration_ms=change.milliseconds,
        reason=change.reason,
    )
