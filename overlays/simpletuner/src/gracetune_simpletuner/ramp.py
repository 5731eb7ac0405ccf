"""The batch ramp inside upstream's training loop, with correct weights in every optimizer step.

The accumulation of an optimizer step is fixed when the step begins. accelerate's own counter is reset there, so the
step ends after exactly that many micro-batches, and each loss is divided by the same number. Micro-batches of different
sizes are weighted by their samples, so that every sample of a step, over all ranks, counts the same. The position of
the ramp depends only on the number of optimizer steps, so a resumed run continues without further state in the
checkpoint.

Upstream's loader makes micro-batches of one size, so an effective batch below one of them on every rank is rejected.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from itertools import islice
from typing import Any

from gracetune.extension import ConfigError, Problem, Ramp, StepBatch, Training, ramp_of
from gracetune_simpletuner.errors import stopping
from gracetune_simpletuner.hooks import Around, check_reads
from gracetune_simpletuner.overlay import Overlay
from gracetune_simpletuner.points import hooks_of

logger = logging.getLogger("gracetune.overlay")


def micro_batches_of(ramp: Ramp, steps: int) -> int:
    """Number of micro-batches in the first `steps` optimizer steps."""
    return sum(step_batch.accumulation for step_batch in islice(ramp.step_batches(), steps))


def steps_in(ramp: Ramp, micro_batches: int) -> int:
    """Number of whole optimizer steps in `micro_batches`, at least one."""
    consumed = steps = 0
    for step_batch in ramp.step_batches():
        consumed += step_batch.accumulation
        if consumed > micro_batches:
            break
        steps += 1
    return max(1, steps)


class RampedSteps:
    """The position of the ramp: the current optimizer step, and its samples so far."""

    def __init__(self, overlay: Overlay, ramp: Ramp) -> None:
        self.overlay, self.ramp = overlay, ramp
        self.consumed: int | None = None
        self.step_batch: StepBatch | None = None
        self._left = 0
        self._samples = 0
        self._batch = ramp.micro_batch
        self._correction = 1.0
        self._trainer: Any = None
        self._epochs_are_upstreams = False

    def wrappers(self) -> dict[str, Around]:
        around: tuple[Around, ...] = (_recalculated, _batch_prepared, _micro_batch, _backward)
        return {hook.target: partial(one, self) for hook, one in zip(hooks_of("ramp"), around, strict=True)}

    def saw_batch(self, trainer: Any, batch: Any) -> None:
        self._trainer, self._batch = trainer, samples_of(batch) or self.ramp.micro_batch

    def open_if_closed(self, accelerator: Any) -> None:
        """Call before every micro-batch. The first one of an optimizer step fixes the accumulation."""
        if self._left == 0:
            if self.consumed is None:
                check_reads("Accelerator", accelerator)
                check_reads("Trainer", self._trainer)
                check_reads("Trainer.state", self._trainer.state)
                self.consumed = micro_batches_of(self.ramp, int(self._trainer.state["global_step"]))
            step_batch = self.ramp.step_batch(self.consumed)
            if self.step_batch is None or step_batch.accumulation != self.step_batch.accumulation:
                logger.debug("GH200 ramp adjusted gradient_accumulation_steps -> %d", step_batch.accumulation)
                self.overlay.telemetry.emit("ramp", micro_batches=self.consumed, accumulation=step_batch.accumulation)
            self.step_batch, self._left = step_batch, step_batch.accumulation
            self._samples, self._correction = 0, 1.0
            accelerator.step = 0
            accelerator.gradient_accumulation_steps = step_batch.accumulation
            self._trainer.config.gradient_accumulation_steps = step_batch.accumulation
            self.overlay.telemetry.of("ramp").add("windows")
        self._left -= 1
        self.consumed = (self.consumed or 0) + 1
        self._samples += self._batch
        self.overlay.telemetry.of("ramp").add("micro_batches")

    def weight(self) -> float:
        """Weight of the current micro-batch relative to a full one."""
        return self._batch / self.ramp.micro_batch * self._correction

    def close(self, accelerator: Any) -> None:
        """Call after the last backward pass of a step: divide the gradients by the actual number of samples."""
        assert self.step_batch is not None
        full = self.step_batch.accumulation * self.ramp.micro_batch * self.ramp.world_size
        had = _over_all_ranks(accelerator, self._samples) if self.ramp.world_size > 1 else self._samples
        if had == full or self._correction != 1.0:
            return
        self._correction = full / had  # also for a further backward pass in the same step
        for parameter in self._trainer._get_trainable_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._correction)
        self.overlay.telemetry.of("ramp").add("windows_with_uneven_batches")

    def correct_steps(self, config: Any, *, epochs_were_unset: bool) -> None:
        """Correct the steps or epochs that upstream computed with one accumulation for the whole run."""
        check_reads("config.steps", config)
        self._epochs_are_upstreams |= epochs_were_unset
        batches = int(config.total_num_batches)
        if config.overrode_max_train_steps:
            option = "max_train_steps"
            was, now = config.max_train_steps, steps_in(self.ramp, math.ceil(batches * float(config.num_train_epochs)))
            config.max_train_steps = now
        elif self._epochs_are_upstreams:
            option = "num_train_epochs"
            needed = micro_batches_of(self.ramp, int(config.max_train_steps))
            was, now = config.num_train_epochs, math.ceil(needed / max(1, batches))
            config.num_train_epochs = now
        else:
            return
        if was != now:
            self.overlay.note(f"{option} is {now} with the ramp, not {was}", event="ramp_steps", upstream=was, ramp=now)


def activate(overlay: Overlay, config: Any) -> None:
    options = overlay.options.ramp
    training = Training(batch_size=int(config.train_batch_size), ramp=options)
    ramp = ramp_of(training, overlay.launch.count)
    _reject_unsupported(ramp, config)
    overlay.activate("ramp", RampedSteps(overlay, ramp).wrappers())
    if ramp.first_line is not None:
        overlay.note(ramp.first_line, event="ramp_enabled")


def _reject_unsupported(ramp: Ramp, config: Any) -> None:
    problems = []
    full = ramp.micro_batch * ramp.world_size
    if min(ramp.initial, ramp.target) < full:
        problems.append(
            Problem(
                "gh200_optimizations.initial_effective_batch_size",
                f"{ramp.initial} with train_batch_size {ramp.micro_batch} on {ramp.world_size} ranks",
                f"at least {full}: upstream's loader makes micro-batches of one size",
                f'"train_batch_size": {max(1, ramp.initial // ramp.world_size)}; `gracetune train` ramps them too',
            )
        )
    if vars(config).get("optimizer_release_gradients"):
        problems.append(
            Problem(
                "optimizer_release_gradients",
                "true",
                "false with a ramp: upstream steps such optimizers by a fixed accumulation",
                '"optimizer_release_gradients": false',
            )
        )
    if vars(config).get("deepspeed_config"):
        problems.append(
            Problem(
                "deepspeed_config",
                "set",
                "no DeepSpeed with a ramp: it divides losses and counts micro-batches by itself",
                "remove deepspeed_config, or set enable_batch_size_rampup to false",
            )
        )
    if problems:
        raise ConfigError(problems)


def samples_of(batch: Any) -> int | None:
    """Number of samples in a prepared batch; None if unknown."""
    for name in ("latents", "tokens", "input_ids"):
        tensor = batch.get(name) if isinstance(batch, dict) else None
        if tensor is not None and tensor.ndim > 0:
            return int(tensor.shape[0])
    return None


def _over_all_ranks(accelerator: Any, count: int) -> int:
    import torch

    return int(accelerator.reduce(torch.tensor(count, device=accelerator.device), reduction="sum"))


# -- the wrappers ------------------------------------------------------------------------------------------------------


def _recalculated(step_batches: RampedSteps, original: Any, trainer: Any, *rest: Any, **more: Any) -> Any:
    with stopping():
        check_reads("config.epochs", trainer.config)
        unset = not trainer.config.num_train_epochs
    result = original(trainer, *rest, **more)
    with stopping():
        step_batches.correct_steps(trainer.config, epochs_were_unset=unset)
    return result


def _batch_prepared(step_batches: RampedSteps, original: Any, trainer: Any, *rest: Any, **more: Any) -> Any:
    batch = original(trainer, *rest, **more)
    if batch:
        step_batches.saw_batch(trainer, batch)
    return batch


def _micro_batch(step_batches: RampedSteps, original: Any, accelerator: Any, *rest: Any, **more: Any) -> Any:
    with stopping():
        step_batches.open_if_closed(accelerator)
    return original(accelerator, *rest, **more)


def _backward(step_batches: RampedSteps, original: Any, accelerator: Any, loss: Any, *rest: Any, **more: Any) -> Any:
    weight = step_batches.weight()
    result = original(accelerator, loss if weight == 1.0 else loss * weight, *rest, **more)
    if accelerator.sync_gradients:
        step_batches.close(accelerator)
    return result
