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
from gracetune.memory.errors import MemoryPressure
from gracetune.memory.layer import UnifiedMemory
from gracetune.memory.sensors import ArenaUsage, HostSensor, Sensors
from gracetune.memory.watchdog import Floors, Watchdog
from gracetune.train.control import Stop
from gracetune.train.job import Job
from gracetune.train.loop import WindowDone
from gracetune.train.view import View

_SHOWN = 8


@dataclass(frozen=True, eq=False)
class _Norm:
    """On its way to the host."""

    step: int
    value: Tensor
    arrived: torch.cuda.Event | None
    batches: tuple[BatchRef, ...]

    @property
    def is_there(self) -> bool:
        return self.arrived is None or self.arrived.query()


class NanGuard:
    """Names the batch whose gradients are not finite. The host never waits for a GPU: it looks at what has arrived.

    Such gradients have become 0 before the optimizer saw them, so the weights that are saved are whole.
    """

    def __init__(self) -> None:
        self._coming: deque[_Norm] = deque()

    def start(self, job: Job) -> None: ...

    def window(self, job: Job, done: WindowDone) -> None:
        if job.scale.skips:
            return  # fp16 meets such gradients every now and then, and lowers its scale
        self._coming.append(_sent(done))
        while self._coming and self._coming[0].is_there:
            self._judge(job, self._coming.popleft())

    def end(self, job: Job, stop: Stop) -> None:
        for norm in self._coming:
            if norm.arrived is not None:
                norm.arrived.synchronize()
            self._judge(job, norm)

    def _judge(self, job: Job, norm: _Norm) -> None:
        if bool(norm.value.isfinite()):
            return
        files = [f"{sample.path} of {sample.dataset}" for batch in norm.batches for sample in batch.samples]
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        job.control.ask_to_stop(
            "failed",
            f"the gradients of step {norm.step} are not finite; its batch: {', '.join(files[:_SHOWN])}{more}. "
            "Nothing of it reached the weights, and they are saved. Look at these files; a lower optimizer.lr or "
            "--set training.mixed_precision=fp32 helps where it is not the data",
        )


def _sent(done: WindowDone) -> _Norm:
    batches = tuple(done.batches)
    if done.norm.device.type != "cuda":
        return _Norm(done.step, done.norm, None, batches)
    value = torch.empty((), pin_memory=True)
    value.copy_(done.norm, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Norm(done.step, value, arrived, batches)


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
    """The governor at every window's end, and the watchdog before every micro-batch."""

    def __init__(self, memory: UnifiedMemory | None, watchdog: Watchdog) -> None:
        self._memory, self._watchdog = memory, watchdog

    def start(self, job: Job) -> None:
        job.memory_alarm = self._alarm

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
