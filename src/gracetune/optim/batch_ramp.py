"""The batch ramp: grow the effective batch quadratically over the first micro-batches. Pure functions.

    E(n) = E_i + (E_t - E_i) min(n / T, 1)^2

n is the number of micro-batches that each rank has consumed when an optimizer step begins, so the size of a step is
fixed before its first micro-batch. T (`ramp_steps`) counts micro-batches too, not optimizer steps. A step is
`accumulation` micro-batches of `micro_batch` samples on every rank. While E(n) is smaller than one full micro-batch on
every rank, the micro-batch itself is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gracetune.config.run_config import Training
from gracetune.errors import ConfigError, Problem


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step."""

    micro_batch: int
    """Samples in one micro-batch of one rank."""
    accumulation: int
    """Micro-batches per rank."""

    @property
    def samples(self) -> int:
        """Samples per rank in the whole optimizer step."""
        return self.micro_batch * self.accumulation


@dataclass(frozen=True)
class Ramp:
    """The size of every optimizer step of a run. Without a ramp all steps are equal."""

    initial: int
    target: int
    """`initial` and `target` are effective batches over all ranks."""
    ramp_steps: int
    """T, in micro-batches of one rank; 0 means the target from the start."""
    micro_batch: int
    """Samples in a full micro-batch of one rank."""
    world_size: int = 1

    def effective(self, consumed: int) -> float:
        """E(consumed): samples over all ranks, before rounding to whole micro-batches."""
        if consumed >= self.ramp_steps:
            return float(self.target)
        return self.initial + (self.target - self.initial) * (consumed / self.ramp_steps) ** 2

    def step_batch(self, consumed: int) -> StepBatch:
        """The optimizer step that begins after `consumed` micro-batches."""
        wanted = self.effective(consumed)
        global_micro_batch = self.micro_batch * self.world_size
        if wanted < global_micro_batch:
            return StepBatch(max(1, _nearest(wanted / self.world_size)), 1)
        return StepBatch(self.micro_batch, _nearest(wanted / global_micro_batch))

    def step_batches(self, consumed: int = 0) -> Iterator[StepBatch]:
        """All optimizer steps from `consumed` on; the iterator never ends."""
        while True:
            step_batch = self.step_batch(consumed)
            yield step_batch
            consumed += step_batch.accumulation

    def samples(self, consumed: int, steps: int) -> int:
        """Samples per rank in the next `steps` optimizer steps after `consumed` micro-batches."""
        total = 0
        while steps and consumed < self.ramp_steps:
            step_batch = self.step_batch(consumed)
            total, steps = total + step_batch.samples, steps - 1
            consumed += step_batch.accumulation
        last = self.step_batch(consumed)
        return total + steps * last.samples

    @property
    def first_line(self) -> str | None:
        """The log line at the start of a run; None without a ramp. Scripts search for it, so its text is fixed.

        Its `initial` and `target` are accumulation steps, not samples.
        """
        if self.ramp_steps == 0:
            return None
        global_micro_batch = self.micro_batch * self.world_size
        initial, target = (max(1, _nearest(batch / global_micro_batch)) for batch in (self.initial, self.target))
        numbers = f"initial={initial}, target={target}, ramp_steps={self.ramp_steps}"
        return f"GH200 gradient accumulation ramp enabled ({numbers})"


def ramp_of(training: Training, world_size: int) -> Ramp:
    """The configured ramp; a constant one if the config enables none."""
    config = training.ramp
    if not config.enabled:
        full = training.batch_size * world_size * training.gradient_accumulation_steps
        return Ramp(full, full, ramp_steps=0, micro_batch=training.batch_size, world_size=world_size)
    initial, target = config.initial_effective_batch_size, config.target_effective_batch_size
    if initial is None or target is None or config.batch_rampup_steps is None:
        raise ValueError("a ramp without its three numbers: the config was not validated by config.rules")
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
    return Ramp(
        initial, target, ramp_steps=config.batch_rampup_steps, micro_batch=training.batch_size, world_size=world_size
    )


def _nearest(value: float) -> int:
    """Round half up. Python's `round` would go to the even neighbour."""
    return math.floor(value + 0.5)
