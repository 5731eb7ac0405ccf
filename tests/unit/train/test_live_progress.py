"""The progress line: refreshed by time, with a line that stays about every 5 % of a run, and without waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from gracetune.telemetry.events import Record, RunStarted, StepDone
from gracetune.telemetry.progress import RunStatus
from gracetune.train.job import Pauses
from gracetune.train.live_progress import REFRESH_S, LiveProgress
from gracetune.train.view import View


class Lines(View):
    def __init__(self) -> None:
        super().__init__()
        self.refreshed: list[RunStatus] = []
        self.kept: list[RunStatus] = []

    def on_status(self, status: RunStatus) -> None:
        self.refreshed.append(status)

    def on_summary(self, status: RunStatus) -> None:
        self.kept.append(status)


def steps(
    total: int, done: int, seconds: float, *, log_every: int = 1000, validate_every: int | None = None
) -> tuple[Lines, int]:
    """Take steps of this duration. Return what was shown, and how many losses were read."""
    lines, now, pauses, reads = Lines(), [0.0], Pauses(), 0
    live = LiveProgress(lines, lambda: {"host": 5}, pauses, lambda: now[0], validate_every=validate_every)
    live.write(Record(0.0, RunStarted(run="r", total_steps=total)))

    def loss() -> Tensor:
        nonlocal reads
        reads += 1
        return torch.tensor(0.5)

    for step in range(1, done + 1):
        now[0] += seconds
        logged = step % log_every == 0
        if logged:
            live.write(Record(0.0, StepDone(step=step, epoch=0, loss=0.25, step_ms=1.0, steps=log_every)))
        live.step_ends(step, "", loss, logged=logged)
        if step == 2 or (validate_every and step % validate_every == 0):  # samples, which do not count as step time
            now[0] += 100.0
            pauses.seconds += 100.0
    live.end(done)
    return lines, reads


def test_slow_steps_are_shown_at_once_with_pace_time_left_and_memory() -> None:
    lines, _ = steps(1000, 3, REFRESH_S + 1)
    started, first, second, third = lines.refreshed
    assert (started.step, started.loss, started.memory) == (0, None, {"host": 5})
    assert (first.step, first.loss, first.seconds_per_step) == (1, 0.5, None)
    assert (second.step, second.seconds_per_step, second.eta_s) == (2, REFRESH_S + 1, 998 * (REFRESH_S + 1))
    assert (third.seconds_per_step, third.memory) == (REFRESH_S + 1, {"host": 5})


def test_time_left_contains_the_validations_that_are_left() -> None:
    lines, _ = steps(8, 8, 10.0, validate_every=2)
    assert [one.eta_s for one in lines.kept] == [
        None,  # the pace is unknown
        60.0,  # the duration of a validation is unknown until the first one is over
        50.0 + 3 * 100.0,
        40.0 + 3 * 100.0,
        30.0 + 2 * 100.0,
        20.0 + 2 * 100.0,
        10.0 + 100.0,
        100.0,  # the last validation follows the last step
    ]


def test_fast_steps_are_shown_every_few_seconds() -> None:
    lines, reads = steps(100_000, 1000, 0.01)
    assert 10 / REFRESH_S <= reads <= 10 / REFRESH_S + 2
    assert [one.step for one in lines.kept] == [1000]


def test_a_line_stays_about_every_5_percent_and_at_the_end() -> None:
    assert [one.step for one in steps(203, 203, 0.01)[0].kept] == [*range(10, 203, 10), 203]
    assert [one.step for one in steps(203, 57, 0.01)[0].kept] == [10, 20, 30, 40, 50, 57], "an interrupted run"
    assert [one.step for one in steps(3, 3, 0.01)[0].kept] == [1, 2, 3]
    lines, reads = steps(200, 200, 0.01, log_every=10)
    assert [one.loss for one in lines.kept] == [0.25] * 20, "the exact loss of the log step"
    assert reads == 2, "at the first step, and after the samples"
