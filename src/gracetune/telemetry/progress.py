"""Progress of a run: steps done, pace, and time left, as numbers and as one line of text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from gracetune.telemetry import number_format
from gracetune.telemetry.events import Event, MemorySampled, MemoryStageChanged, RunStarted, StepDone

WARM_UP_STEPS = 3
"""First steps of each process that do not count: compilation, allocation and first reads make them slow."""
SEPARATOR = " · "
RECENT = 50
"""Number of events whose median is the pace. A median, so that a validation or a slow disk does not change it."""


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands."""

    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    expert: str = ""
    """Expert trained last; empty if the model has one denoiser."""
    seconds_per_step: float | None = None
    """Without the warm-up steps; None until known."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes in use by tier."""
    memory_stage: int | None = None
    """None if the unified-memory layer is not open."""
    pauses_left_s: float = 0.0
    """Expected duration of the validations that are left."""

    @property
    def eta_s(self) -> float | None:
        """Time left."""
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step + self.pauses_left_s

    def line(self) -> str:
        """`step 120/1,000 · loss 0.1234 · 1.52 s/it · ETA 22m 17s · memory stage 1 · device 61.2 GiB`"""
        total = "" if self.total_steps is None else f"/{self.total_steps:,}"
        return SEPARATOR.join([f"step {self.step:,}{total}", *self.parts()])

    def parts(self) -> list[str]:
        """The parts of the line without the step, the most important first: a narrow terminal leaves out the last."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}" + (f" ({self.expert})" if self.expert else ""))
        parts.append(number_format.pace(self.seconds_per_step))
        if self.eta_s:
            parts.append(f"ETA {number_format.duration(self.eta_s)}")
        if self.memory_stage is not None:
            parts.append(f"memory stage {self.memory_stage}")
        parts += [f"{tier} {number_format.size(used)}" for tier, used in self.memory.items()]
        return parts


class ProgressTracker:
    """Computes the `RunStatus` from the events of a run."""

    def __init__(self, *, warm_up_steps: int = WARM_UP_STEPS, recent: int | None = RECENT) -> None:
        """With `recent` None, the pace is the median of all events."""
        self._warm_up_steps = warm_up_steps
        self._paces: deque[float] = deque(maxlen=recent)
        self._first_step = 0
        self._step = 0
        self._memory_stage: int | None = None
        self._last: StepDone | None = None
        self._total: int | None = None
        self._memory: MemorySampled | None = None

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._first_step, self._total = event.resumed_step or 0, event.total_steps
                self._paces.clear()
                self._last = self._memory = self._memory_stage = None
                self._step = self._first_step
            case StepDone():
                self._last = event
                self._step = event.step
                first = event.step - event.steps
                if first >= self._first_step + self._warm_up_steps:
                    self._paces.append(event.step_ms / 1000)
            case MemoryStageChanged():
                self._step, self._memory_stage = event.step, event.after
            case MemorySampled():
                self._memory = event
                stage = event.counters.get("uvm.stage", math.nan)
                self._memory_stage = int(stage) if math.isfinite(stage) else None

    def status(self) -> RunStatus:
        last, memory = self._last, self._memory
        return RunStatus(
            step=self._step,
            total_steps=self._total,
            loss=None if last is None else last.loss,
            expert="" if last is None else last.stage,
            seconds_per_step=median(self._paces) if self._paces else None,
            memory={} if memory is None else {tier: sum(used.values()) for tier, used in memory.used_bytes.items()},
            memory_stage=self._memory_stage,
        )
