"""The batch ramp: the effective batch grows quadratically over the first micro-batches. Pure.

    E(n) = E_i + (E_t - E_i) min(n / T, 1)^2

n is the number of micro-batches consumed when an accumulation window opens, so what a window looks like is settled
before it begins and does not change under it. A window is `accumulation` micro-batches of `micro_batch` samples on
every rank. While E(n) is smaller than one full micro-batch on every rank, the micro-batch itself is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gracetune.config.run_config import Training
from gracetune.errors import ConfigError, Problem


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step's worth of micro-batches."""

    micro_batch: int
    """Samples of one rank's micro-batch."""
    accumulation: int
    """Micro-batches of one rank."""

    @property
    def samples(self) -> int:
        """Of one rank, in the whole optimizer step."""
        return self.micro_batch * self.accumulation


@dataclass(frozen=True)
class Ramp:
    """`step_batch(n)` for every n. Without a ramp all windows are alike."""

    initial: int
    target: int
    """Effective batches, over all ranks."""
    ramp_steps: int
    """T, in micro-batches; 0 means the target from the start."""
    micro_batch: int
    world_size: int = 1

    def effective(self, consumed: int) -> float:
        if consumed >= self.ramp_steps:
            return float(self.target)
        return self.initial + (self.target - self.initial) * (consumed / self.ramp_steps) ** 2

    def step_batch(self, consumed: int) -> StepBatch:
        """The window that opens after `consumed` micro-batches."""
        wanted = self.effective(consumed)
        one_round = self.micro_batch * self.world_size
        if wanted < one_round:
            return StepBatch(max(1, _nearest(wanted / self.world_size)), 1)
        return StepBatch(self.micro_batch, _nearest(wanted / one_round))

    def step_batches(self, consumed: int = 0) -> Iterator[StepBatch]:
        """All windows from `consumed` on, without end."""
        while True:
            step_batch = self.step_batch(consumed)
            yield step_batch
            consumed += step_batch.accumulation

    def samples(self, consumed: int, steps: int) -> int:
        """Of one rank, in so many windows from `consumed` on."""
        found = 0
        while steps and consumed < self.ramp_steps:
            step_batch = self.step_batch(consumed)
            found, steps = found + step_batch.samples, steps - 1
            consumed += step_batch.accumulation
        last = self.step_batch(consumed)
        return found + steps * last.samples

    @property
    def first_line(self) -> str | None:
        """What the log says at the start; None without a ramp."""
        if self.ramp_steps == 0:
            return None
        per_round = self.micro_batch * self.world_size
        initial, target = (max(1, _nearest(batch / per_round)) for batch in (self.initial, self.target))
        numbers = f"initial={initial}, target={target}, ramp_steps={self.ramp_steps}"
        return f"GH200 gradient accumulation ramp enabled ({numbers})"


def ramp_of(training: Training, world_size: int) -> Ramp:
    """The ramp a config asks for; a constant one where it asks for none."""
    config = training.ramp
    if not config.enabled:
        full = training.batch_size * world_size * training.gradient_accumulation_steps
        return Ramp(full, full, 0, training.batch_size, world_size)
    initial, target = config.initial_effective_batch_size, config.target_effective_batch_size
    if initial is None or target is None or config.batch_rampup_steps is None:
        raise ValueError("a ramp without its three numbers has not been through config.rules")
    if initial < world_size:
        raise ConfigError(
            [
                Problem(
                    "training.ramp.initial_effective_batch_size",
                    str(initial),
                    f"at least {world_size}: each of the {world_size} processes needs a sample",
                    f"--set training.ramp.initial_effective_batch_size={world_size}",
                )
            ]
        )
    return Ramp(initial, target, config.batch_rampup_steps, training.batch_size, world_size)


def _nearest(value: float) -> int:
    """Half a step goes up, whatever the parity: `round` would go to the even one."""
    return math.floor(value + 0.5)
