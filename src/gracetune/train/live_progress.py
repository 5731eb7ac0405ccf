"""What the screen shows while a run trains: loss, pace, time left and memory.

The line is refreshed every few seconds, and at log steps. About every 5 % of the run it is also printed as a summary
line that scrolls up and stays. The loss of a refresh is copied to the host without synchronizing, and is shown at a
later step, once it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import MemoryStageChanged, Record, RunStarted, StepDone
from gracetune.telemetry.progress import ProgressTracker, RunStatus
from gracetune.train.job import Pauses
from gracetune.train.view import View

REFRESH_S = 2.0
"""Seconds between two refreshes."""
SUMMARIES = 20
"""Number of summary lines in a whole run."""
RECENT = 50
"""Steps whose mean duration is the pace."""


@dataclass(frozen=True)
class _Reading:
    """A loss on its way to the host."""

    step: int
    expert: str
    is_summary: bool
    loss: Tensor
    arrived: torch.cuda.Event | None
    """None if the loss is in host memory already."""

    def is_ready(self) -> bool:
        return self.arrived is None or self.arrived.query()


class LiveProgress:
    """Shows the status of a run. It is a telemetry sink, for the exact values of log steps, and the log callback
    reports every step to it (`step_ends`)."""

    name = "the progress line"

    def __init__(
        self, view: View, memory: Callable[[], Mapping[str, int]], pauses: Pauses, clock: Callable[[], float],
        *, validate_every: int | None = None,
    ) -> None:  # fmt: skip
        """`memory` returns the bytes in use by tier, without synchronizing. `clock` is in seconds. `validate_every` is
        the interval of validations in steps."""
        self._view, self._memory, self._pauses, self._clock = view, memory, pauses, clock
        self._validate_every = validate_every
        self._first_step = 0
        """The step that this process began at."""
        self._first_pause = 0.0
        """Seconds that the first validation took, before the first step."""
        self._tracker = ProgressTracker()
        self._every = 1
        """Steps between two summary lines."""
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT)
        """(end time minus all pauses so far, step) of the last steps. The duration of the first one is not counted."""
        self._readings: deque[_Reading] = deque()
        self._refreshed = -REFRESH_S
        self._summarised: int | None = None
        """Step of the last summary line."""

    def write(self, record: Record) -> None:
        event = record.event
        self._tracker.observe(event)
        if isinstance(event, RunStarted):
            self._every = max(1, round((event.total_steps or 0) / SUMMARIES))
            self._first_step = event.resumed_step or 0
        if isinstance(event, RunStarted | MemoryStageChanged | StepDone):
            self._view.on_status(self._status())

    def close(self) -> None: ...

    def step_ends(self, step: int, expert: str, mean_loss: Callable[[], Tensor], *, logged: bool) -> None:
        """Refresh the line if it is time. `mean_loss` computes the mean since the last log step. `logged` is True
        at a log step, whose loss an event has reported already."""
        now = self._clock()
        if not self._ends:
            self._first_pause = self._pauses.seconds
        self._ends.append((now - self._pauses.seconds, step))
        self._show_arrived()
        is_summary = step % self._every == 0
        if logged:
            self._refreshed = now
            if is_summary:
                self._summarise(self._status())
        elif is_summary or (not self._readings and now - self._refreshed >= REFRESH_S):
            self._refreshed = now
            self._readings.append(_begin_reading(step, expert, mean_loss(), is_summary=is_summary))
            self._show_arrived()

    def end(self, step: int) -> None:
        """Print a summary line for the last step, unless there is one."""
        self._readings.clear()
        if self._ends and self._summarised != step:
            self._summarise(replace(self._status(step), pauses_left_s=0.0))

    def _show_arrived(self) -> None:
        while self._readings and self._readings[0].is_ready():
            reading = self._readings.popleft()
            status = replace(self._status(reading.step), loss=reading.loss.item(), expert=reading.expert)
            if reading.is_summary:
                self._summarise(status)
            else:
                self._view.on_status(status)

    def _summarise(self, status: RunStatus) -> None:
        self._summarised = status.step
        self._view.on_summary(status)

    def _status(self, step: int | None = None) -> RunStatus:
        """The status after `step`, or after the last step that an event reported."""
        status = self._tracker.status()
        pace = status.seconds_per_step
        if len(self._ends) > 1:
            (began, first), (ended, last) = self._ends[0], self._ends[-1]
            pace = max(0.0, ended - began) / (last - first)
        used = dict(self._memory())
        if "device" in used:  # torch counts the overflow arena as device memory
            used["device"] = max(0, used["device"] - status.memory.get("arena", 0))
        step = status.step if step is None else step
        left = self._pauses_left(step, status.total_steps)
        return replace(status, step=step, seconds_per_step=pace, memory={**status.memory, **used}, pauses_left_s=left)

    def _pauses_left(self, step: int, total: int | None) -> float:
        """The mean pause for each validation so far, times the number of those that are left. The one after `step`
        itself is left: the line is shown before it begins."""
        every = self._validate_every
        if every is None or total is None:
            return 0.0
        validated = max(self._first_step, step - 1) // every
        done = validated - self._first_step // every + (self._first_step == 0 and self._first_pause > 0)
        return (total // every - validated) * self._pauses.seconds / done if done else 0.0


def validation_interval(config: RunConfig) -> int | None:
    """Steps between validations: the longer interval, if samples and held-out loss have different ones."""
    section = config.validation
    samples = section.every_steps if section.enabled and section.prompts else None
    return max((one for one in (samples, section.loss_every_steps) if one is not None), default=None)


def _begin_reading(step: int, expert: str, loss: Tensor, *, is_summary: bool) -> _Reading:
    if loss.device.type != "cuda":
        return _Reading(step, expert, is_summary, loss, None)
    on_host = torch.empty((), dtype=loss.dtype, pin_memory=True)
    on_host.copy_(loss, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(loss.device))
    return _Reading(step, expert, is_summary, on_host, arrived)
