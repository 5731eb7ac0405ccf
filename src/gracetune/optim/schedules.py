"""Learning rates over a run. Pure: `learning_rate(step, total, ...)`; `build_schedule` hangs it on an optimizer.

`step` counts optimizer steps from 0 and `total` is the run's, so `progress` p runs from 0 after the warm-up to 1.
All but `constant` begin with `warmup_steps` steps that rise in a straight line from 0, as in diffusers.

    constant                L                        (a warm-up needs constant_with_warmup)
    constant_with_warmup    L
    linear                  E + (L - E) (1 - p)
    polynomial              E + (L - E) (1 - p)^power
    cosine                  E + (L - E) (1 + cos(pi p)) / 2
    cosine_with_restarts    E + (L - E) (1 + cos(pi (cycles p mod 1))) / 2
    sine                    E + (L - E) (1 + cos(2 pi cycles p)) / 2

L is a group's own rate, E is `end_lr`. `sine` is a wave that keeps going, not a fall: `cycles` whole waves between L
and E, from the top, where the warm-up has led.

With `half_period` H, `cosine` and `sine` are waves of optimizer steps s, as in SimpleTuner, without a warm-up:

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

_NO_FALL: Final = ("constant", "constant_with_warmup")
WAVES: Final = ("cosine", "sine")
"""Schedules that read `half_period`."""


def learning_rate(step: int, total: int, schedule: Schedule, lr: float) -> float:
    """The rate of the optimizer step number `step` (from 0) of `total`; beyond the end it stays where it ended."""
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
    return schedule.end_lr + (lr - schedule.end_lr) * _height(progress, schedule)


def is_wave(schedule: Schedule) -> bool:
    """Whether it goes up and down for the whole run."""
    return schedule.half_period is not None and schedule.name in WAVES


def _wave(step: int, schedule: Schedule) -> float:
    angle = math.pi * step / (schedule.half_period or 1)
    return (1.0 + (math.cos(angle) if schedule.name == "cosine" else math.sin(angle))) / 2


def _height(progress: float, schedule: Schedule) -> float:
    match schedule.name:
        case "linear":
            return 1.0 - progress
        case "polynomial":
            return float((1.0 - progress) ** schedule.power)
        case "cosine":
            return (1.0 + math.cos(math.pi * progress)) / 2
        case "cosine_with_restarts":
            if progress >= 1:  # the last fall ends at the bottom, it does not start anew
                return 0.0 if schedule.cycles == int(schedule.cycles) else _half_wave(schedule.cycles % 1)
            return _half_wave(schedule.cycles * progress % 1)
        case "sine":
            return (1.0 + math.cos(2 * math.pi * schedule.cycles * progress)) / 2
        case _:
            raise ValueError(f"no falling schedule {schedule.name!r}")


def _half_wave(part: float) -> float:
    return (1.0 + math.cos(math.pi * part)) / 2


@dataclass(frozen=True, eq=False)
class Scheduled:
    scheduler: LambdaLR
    notes: tuple[str, ...] = ()
    """What was asked for and means nothing here, or less than it says."""


def build_schedule(optimizer: Optimizer, schedule: Schedule, *, optimizer_name: str, total: int) -> Scheduled:
    """`total` counts optimizer steps (with a batch ramp: from its simulation). Every group keeps its own rate."""
    used, notes = effective(schedule, optimizer_name)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    _check(used, rates)
    notes = (*notes, *_unfinished_warmup(used, total))
    return Scheduled(LambdaLR(optimizer, [_factor(used, total, rate) for rate in rates]), notes)


def move_to(scheduler: LambdaLR, steps: int) -> None:
    """As if `steps` optimizer steps had been taken: the rates are a function of their number alone."""
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": steps, "_step_count": steps + 1})
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(steps)


def effective(schedule: Schedule, optimizer_name: str) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule that will be followed, and what of the one asked for is left out."""
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
        return learning_rate(step, total, schedule, lr) / lr if lr > 0 else 1.0  # 0 stays 0 whatever the factor

    return factor


def _unfinished_warmup(schedule: Schedule, total: int) -> Iterator[str]:
    """No error, as in the peers: `--max-steps` shortens a run, and its warm-up stays as the file says."""
    if schedule.name == "constant" or is_wave(schedule) or schedule.warmup_steps < total:
        return
    share = (total - 1) / schedule.warmup_steps
    yield (
        f"schedule.warmup_steps: {schedule.warmup_steps}, and the run has {total} optimizer steps: the learning rate "
        f"rises to {share:.2g} of optimizer.lr; for a shorter warm-up --set schedule.warmup_steps={total // 10}"
    )


def _check(schedule: Schedule, rates: list[float]) -> None:
    lowest = min(rates)
    if schedule.name not in _NO_FALL and schedule.end_lr > lowest > 0:
        expected = f"at most the learning rate it falls from, {lowest:g}"
        hint = "lower it, or raise optimizer.lr"
        raise ConfigError([Problem("schedule.end_lr", f"{schedule.end_lr:g}", expected, hint)])
