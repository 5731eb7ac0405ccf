"""Learning-rate schedules. `learning_rate(step, total, ...)` is pure; `build_schedule` attaches it to an optimizer.

`step` counts optimizer steps from 0 and `total` is their number in the run. The progress p goes from 0 at the end of
the warm-up to 1. All schedules but `constant` begin with `warmup_steps` steps that rise linearly from 0, as in
diffusers.

    constant                L                        (a warm-up needs constant_with_warmup)
    constant_with_warmup    L
    linear                  E + (L - E) (1 - p)
    polynomial              E + (L - E) (1 - p)^power
    cosine                  E + (L - E) (1 + cos(pi p)) / 2
    cosine_with_restarts    E + (L - E) (1 + cos(pi (cycles p mod 1))) / 2
    sine                    E + (L - E) (1 + cos(2 pi cycles p)) / 2

L is the param group's rate and E is `end_lr`. `sine` does not decay: it goes through `cycles` full waves between L and
E, and begins at L, where the warm-up ends.

With `half_period` H, `cosine` and `sine` are waves over the optimizer steps s, as in SimpleTuner, without a warm-up:

    cosine                  E + (L - E) (1 + cos(pi s / H)) / 2, from the top
    sine                    E + (L - E) (1 + sin(pi s / H)) / 2, from the middle
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gracetune.config.run_config import Schedule
from gracetune.errors import ConfigError, Problem
from gracetune.optim.record import optimizer_record

_NO_DECAY: Final = ("constant", "constant_with_warmup")
WAVES: Final = ("cosine", "sine")
"""Schedules that use `half_period`."""


def learning_rate(step: int, total: int, schedule: Schedule, lr: float) -> float:
    """The rate of optimizer step `step` (from 0) of `total`. After the end it keeps its last value."""
    if step < 0:
        raise ValueError(f"optimizer steps count from 0, not from {step}")
    if schedule.name == "constant":
        return lr
    if is_wave(schedule):
        return schedule.end_lr + (lr - schedule.end_lr) * _wave(step, schedule)
    warmup = schedule.warmup_steps
    if step < warmup:
        return lr * step / warmup
    if schedule.name == "constant_with_warmup":
        return lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return schedule.end_lr + (lr - schedule.end_lr) * _decay(progress, schedule)


def is_wave(schedule: Schedule) -> bool:
    """Whether the rate oscillates for the whole run (`half_period`)."""
    return schedule.half_period is not None and schedule.name in WAVES


def _wave(step: int, schedule: Schedule) -> float:
    angle = math.pi * step / (schedule.half_period or 1)
    return (1.0 + (math.cos(angle) if schedule.name == "cosine" else math.sin(angle))) / 2


def _decay(progress: float, schedule: Schedule) -> float:
    """The share of L - E that is left at `progress`: 1 at the start, 0 at the bottom."""
    match schedule.name:
        case "linear":
            return 1.0 - progress
        case "polynomial":
            return float((1.0 - progress) ** schedule.power)
        case "cosine":
            return (1.0 + math.cos(math.pi * progress)) / 2
        case "cosine_with_restarts":
            if progress >= 1:  # the last cycle ends at its minimum and does not restart
                return 0.0 if schedule.cycles == int(schedule.cycles) else _half_wave(schedule.cycles % 1)
            return _half_wave(schedule.cycles * progress % 1)
        case "sine":
            return (1.0 + math.cos(2 * math.pi * schedule.cycles * progress)) / 2
        case _:
            raise ValueError(f"no decaying schedule {schedule.name!r}")


def _half_wave(part: float) -> float:
    return (1.0 + math.cos(math.pi * part)) / 2


@dataclass(frozen=True, eq=False)
class Scheduled:
    """An attached schedule."""

    scheduler: LambdaLR
    notes: tuple[str, ...] = ()
    """Settings of the schedule that have no effect, or less than they say."""


def build_schedule(optimizer: Optimizer, schedule: Schedule, *, optimizer_name: str, total: int) -> Scheduled:
    """`total` counts optimizer steps; with a batch ramp it comes from simulating the ramp.

    Every group keeps its own rate.
    """
    used, notes = effective_schedule(schedule, optimizer_name)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    _check(used, rates)
    notes = (*notes, *_unfinished_warmup(used, total))
    return Scheduled(LambdaLR(optimizer, [_factor(used, total, rate) for rate in rates]), notes)


def move_to(scheduler: LambdaLR, steps: int) -> None:
    """Set the schedule to the state after `steps` optimizer steps. The rates depend on that number alone."""
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": steps, "_step_count": steps + 1})
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(steps)


def effective_schedule(schedule: Schedule, optimizer_name: str) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule that the run follows, and notes on the settings that it ignores."""
    notes = []
    why = optimizer_record(optimizer_name).constant_rate
    if why:
        if schedule != Schedule():
            notes.append(f"schedule {schedule.name}: not followed with {optimizer_name}, whose rate is constant: {why}")
        return Schedule(), tuple(notes)
    if schedule.name == "constant" and schedule.warmup_steps > 0:
        notes.append("schedule.warmup_steps: none with `constant`; write `constant_with_warmup` for a warm-up")
    if is_wave(schedule) and schedule.warmup_steps > 0:
        notes.append("schedule.warmup_steps: none with `half_period`, whose wave begins with the first step")
    if schedule.half_period is not None and not is_wave(schedule):
        notes.append(f"schedule.half_period: {schedule.name} has none; {' and '.join(WAVES)} do")
    if (schedule.name not in ("cosine_with_restarts", "sine") or is_wave(schedule)) and schedule.cycles != 1:
        what = f"{schedule.name} with `half_period`" if is_wave(schedule) else schedule.name
        notes.append(f"schedule.cycles: {what} has none; cosine_with_restarts and sine do")
    if schedule.name != "polynomial" and schedule.power != 1:
        notes.append(f"schedule.power: {schedule.name} has none; polynomial does")
    return schedule, tuple(notes)


def _factor(schedule: Schedule, total: int, lr: float) -> Callable[[int], float]:
    def factor(step: int) -> float:
        return learning_rate(step, total, schedule, lr) / lr if lr > 0 else 1.0  # any factor leaves 0 at 0

    return factor


def _unfinished_warmup(schedule: Schedule, total: int) -> Iterator[str]:
    """A note, not an error: `--max-steps` shortens a run and leaves the warm-up of the config as it is."""
    if schedule.name == "constant" or is_wave(schedule) or schedule.warmup_steps < total:
        return
    share = (total - 1) / schedule.warmup_steps
    yield (
        f"schedule.warmup_steps: {schedule.warmup_steps}, and the run has {total} optimizer steps: the learning rate "
        f"rises to {share:.2g} of optimizer.lr; for a shorter warm-up --set schedule.warmup_steps={total // 10}"
    )


def _check(schedule: Schedule, rates: list[float]) -> None:
    lowest = min(rates)
    if schedule.name not in _NO_DECAY and schedule.end_lr > lowest > 0:
        expected = f"at most the learning rate it falls from, {lowest:g}"
        hint = "lower it, or raise optimizer.lr"
        raise ConfigError([Problem("schedule.end_lr", f"{schedule.end_lr:g}", expected, hint)])
