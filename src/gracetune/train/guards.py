"""What stops a run before it does damage: numbers that are none, and memory that runs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.data.refs import BatchRef
from gracetune.hardware import Machine
from gracetune.hardware.allocation import host_reserve
from gracetune.hostmem.sensors import HostSensor
from gracetune.memory.errors import MemoryPressure
from gracetune.memory.governor import Action, ArenaChange, MemoryChange, StageChange
from gracetune.memory.layer import UnifiedMemory
from gracetune.memory.sensors import ArenaUsage, Sensors
from gracetune.memory.watchdog import Floors, Watchdog
from gracetune.telemetry.events import Event, MemoryReclaimed, MemoryStageChanged, OverflowArenaChanged
from gracetune.telemetry.hub import Telemetry
from gracetune.train.control import Stop
from gracetune.train.job import Job, Standing
from gracetune.train.loop import WindowDone
from gracetune.train.view import View

_SHOWN = 8


_MOST_SKIPPED = 40
"""Windows in a row: so many halvings take fp16's loss scale to where nothing can overflow any more."""


@dataclass(frozen=True, eq=False)
class _Norm:
    """On its way to the host."""

    step: int
    value: Tensor
    arrived: torch.cuda.Event | None
    batches: tuple[BatchRef, ...]
    before: Standing
    """Where the run stood before this window."""

    @property
    def is_there(self) -> bool:
        return self.arrived is None or self.arrived.query()


class NanGuard:
    """Ends a run at gradients that are not finite, and names their batch.

    The host never waits for a GPU: it looks at what has arrived. The device has left out the step of that window and of
    all after it (`Job.take_step`), so the run goes back to where it stood before it, and that is what is saved.
    fp16 meets such gradients every now and then and lowers its scale; only many of them in a row end the run.
    """

    def __init__(self) -> None:
        self._coming: deque[_Norm] = deque()
        self._stood: Standing | None = None
        self._skipped = 0
        self._failure: Stop | None = None
        self._before: Standing | None = None
        """Where the run stood before the window that failed."""

    def start(self, job: Job) -> None:
        self._stood = job.standing()
        job.settle = lambda: self._settled(job)

    def window(self, job: Job, done: WindowDone) -> None:
        assert self._stood is not None, "start() was called"
        self._coming.append(_sent(done, self._stood))
        self._stood = job.standing()
        while self._coming and self._coming[0].is_there:
            self._judge(job, self._coming.popleft())

    def end(self, job: Job, stop: Stop) -> None: ...

    def _settled(self, job: Job) -> Stop | None:
        while self._coming:
            norm = self._coming.popleft()
            if norm.arrived is not None:
                norm.arrived.synchronize()
            self._judge(job, norm)
        if self._before is not None:  # all ranks come here at the same window, so all go back together
            job.go_back(self._before)
        return self._failure

    def _judge(self, job: Job, norm: _Norm) -> None:
        """Of the windows after the one that failed nothing is to be said: they have changed nothing."""
        good = bool(norm.value.isfinite())
        self._skipped = 0 if good else self._skipped + 1
        if good or self._failure is not None or (job.scale.skips and self._skipped < _MOST_SKIPPED):
            return
        self._before = None if job.scale.skips else norm.before
        saved = (self._before or job.standing()).position.step
        self._failure = Stop("failed", _what_failed(norm, self._skipped, saved))
        job.control.ask_to_stop(self._failure.kind, self._failure.reason)


def _what_failed(norm: _Norm, windows: int, saved: int) -> str:
    files = [f"{sample.path} of {sample.dataset}" for batch in norm.batches for sample in batch.samples]
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    which = f"step {norm.step}" if windows == 1 else f"{windows} steps in a row, the last of them {norm.step},"
    kept = f", and saved at step {saved}" if saved else "; nothing was learnt yet, so nothing is saved"
    return (
        f"the gradients of {which} are not finite; its batch: {', '.join(files[:_SHOWN])}{more}. Weights and optimizer "
        f"are as they were before{kept}. Look at these files; a lower optimizer.lr or "
        "--set training.mixed_precision=fp32 helps where it is not the data"
    )


def _sent(done: WindowDone, before: Standing) -> _Norm:
    batches = tuple(done.batches)
    if done.norm.device.type != "cuda":
        return _Norm(done.step, done.norm, None, batches, before)
    value = torch.empty((), pin_memory=True)
    value.copy_(done.norm, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Norm(done.step, value, arrived, batches, before)


def host_room(machine: Machine, memory: UnifiedMemory | None) -> Callable[[], int]:
    """How much main memory may still be used; 0 where nobody knows."""
    sensors, reserve = _sensors(machine, memory), host_reserve(machine)
    return lambda: max(0, (sensors.vitals().host_headroom or 0) - reserve)


def _sensors(machine: Machine, memory: UnifiedMemory | None) -> Sensors:
    return memory.sensors if memory is not None else Sensors(HostSensor(machine.gpus), None, _NoArena())


def watch(machine: Machine, memory: UnifiedMemory | None, view: View) -> Watchdog:
    """Looks at main memory once a second. Half of what nobody may touch is the floor: there the run is saved."""
    sensors = _sensors(machine, memory)
    floors = Floors(host=host_reserve(machine) // 2)
    return Watchdog(sensors.vitals, floors, report=lambda event: view.warn(f"memory watchdog: {event.text}"))


@dataclass(frozen=True)
class _NoArena:
    def usage(self) -> ArenaUsage:
        return ArenaUsage(0, 0)


class MemoryGuard:
    """The governor after every optimizer step, and the watchdog before every micro-batch.

    What the governor changes is an event at once, whatever the log steps are. A change of the memory stage is also a
    line on the screen.
    """

    def __init__(self, memory: UnifiedMemory | None, watchdog: Watchdog, telemetry: Telemetry, view: View) -> None:
        self._memory, self._watchdog = memory, watchdog
        self._telemetry, self._view = telemetry, view

    def start(self, job: Job) -> None:
        job.memory_alarm = self._alarm
        if self._memory is not None:
            self._memory.on_change(lambda change: self._report(job.position.step, change))

    def _report(self, step: int, change: MemoryChange) -> None:
        if isinstance(change, StageChange):
            self._view.say(f"step {step}: memory {change.reason}")
        self._telemetry.emit(memory_change_event(step, change))

    def _alarm(self) -> str | None:
        asked = self._watchdog.requested()
        return None if asked is None else f"memory: {asked.reason}"

    def window(self, job: Job, done: WindowDone) -> None:
        if self._memory is not None:
            try:
                self._memory.step()
            except MemoryPressure as pressure:
                job.control.ask_to_stop("interrupted", str(pressure))

    def end(self, job: Job, stop: Stop) -> None: ...


def memory_change_event(step: int, change: MemoryChange) -> Event:
    if isinstance(change, StageChange):
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
