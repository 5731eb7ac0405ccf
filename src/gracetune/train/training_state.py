"""The state that an optimizer step changes, apart from the weights: optimizer, schedule, loss scale, EMA, position.

A checkpoint saves all of it (`state_parts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gracetune.data.index import DataIndex
from gracetune.data.loader import Loader
from gracetune.data.sampler import Order
from gracetune.optim.averages import EmaWeights, averaged
from gracetune.optim.batch_ramp import Ramp
from gracetune.optim.chunked_adamw import ChunkedAdamW
from gracetune.optim.schedules import move_to
from gracetune.optim.step_skipping import step_unless
from gracetune.train.gradients import LossScale, NoScale


@dataclass
class Position:
    """How far a run is. It is updated at the end of every optimizer step and is equal on all ranks."""

    step: int = 0
    """Optimizer steps done. The expert to train follows from this alone."""
    micro_batches: int = 0
    """Micro-batches done by each rank. The batch ramp follows this count."""
    samples: int = 0
    """Samples seen by all ranks together."""
    epoch: int = 0
    """The epoch of the next batch, counted from 0."""

    def move_to(self, other: Position) -> None:
        """Copy `other` into this object, which other parts of the run share."""
        self.step, self.micro_batches = other.step, other.micro_batches
        self.samples, self.epoch = other.samples, other.epoch


@dataclass(frozen=True)
class Length:
    """How many optimizer steps a run has, and why."""

    steps: int
    reason: str


def length_of(index: DataIndex, ramp: Ramp, *, batch_size: int, max_steps: int | None, epochs: int | None) -> Length:
    """The length given by `max_steps` or, without it, by `epochs`. Epochs are counted without reading any sample."""
    if max_steps is not None:
        return Length(max_steps, "training.max_steps")
    if epochs is None:
        raise ValueError("neither steps nor epochs: config.rules lets no such config pass")
    order = index.order(batch_size)
    by_step = order.alternates or any(source.start_step or source.end_step is not None for source in order.sources)
    count = _count_by_batches if by_step or ramp.ramp_steps else _count_by_epochs
    steps, micro_batches = count(order, ramp, epochs)
    return Length(steps, f"{epochs} epochs of {micro_batches} micro-batches in all")


def _count_by_epochs(order: Order, ramp: Ramp, epochs: int) -> tuple[int, int]:
    """Steps and micro-batches if batches do not depend on the step: the size of an epoch is known without sampling."""
    step_batch, micro_batches = ramp.step_batch(0), 0
    for epoch in range(epochs):
        batches = order.whole_epoch(epoch, step_batch.micro_batch, step=0, world_size=ramp.world_size).batches
        if not batches:
            break  # no dataset is active any more
        micro_batches += batches
    return -(-micro_batches // step_batch.accumulation), micro_batches  # the last step may have fewer micro-batches


def _count_by_batches(order: Order, ramp: Ramp, epochs: int) -> tuple[int, int]:
    """Steps and micro-batches if the batch size grows or datasets start and end at steps: go through all batches."""
    cursor = order.start()
    micro_batches = steps = filled = 0
    step_batch = ramp.step_batch(0)
    while cursor.epoch < epochs:
        batch = order.next_batch(cursor, step_batch.micro_batch, steps, ramp.world_size)
        if batch is None:
            if not cursor.batches:
                break  # no dataset is active any more
            cursor = order.next_epoch(cursor)
            continue
        cursor = batch[1]
        micro_batches, filled = micro_batches + 1, filled + 1
        if filled == step_batch.accumulation:
            steps, filled = steps + 1, 0
            step_batch = ramp.step_batch(micro_batches)
    return steps + (filled > 0), micro_batches


@dataclass(frozen=True)
class ResumePoint:
    """The host's part of the state between two steps. The rest of the state is on the device."""

    position: Position
    loader: dict[str, object]
    schedule_steps: int
    ema_steps: int


class TrainingState:
    """One object for the whole run. Its `position` is shared, too, and changes in place."""

    def __init__(
        self, optimizer: Optimizer, schedule: LambdaLR, scale: LossScale | NoScale, ema: EmaWeights | None,
        loader: Loader,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`ema` is None if the run keeps no EMA weights."""
        self.optimizer, self.schedule, self.scale, self.ema = optimizer, schedule, scale, ema
        self.loader = loader
        self.position = Position()
        self.saved_loader = loader.state_dict()
        """The loader's state after the last step. A stop within a step resumes from there."""
        self.skipped: Tensor = torch.zeros((), device=device)
        """[], on the device: 1 if optimizer steps are skipped (`optim.step_skipping`)."""

    def take_step(self, norm: Tensor) -> None:
        """Take the optimizer step, unless the gradients are not finite. `norm` is their norm.

        A skipped step changes neither weights nor optimizer state nor EMA weights. In fp16 it is an ordinary event, and
        the next step counts again. Otherwise it ends the run. The host learns of it later, so all steps until then
        are skipped as well.
        """
        found = (~norm.isfinite()).float()
        self.skipped = found if self.scale.skips else torch.maximum(self.skipped, found)
        step_unless(self.optimizer, self.skipped)
        if self.ema is not None:
            self.ema.update(self.skipped)
        self.scale.update(norm)
        self.schedule.step()

    def advance(self, micro_batches: int, samples: int) -> None:
        self.position.step += 1
        self.position.micro_batches += micro_batches
        self.position.samples += samples
        self.position.epoch = self.loader.epoch
        self.saved_loader = self.loader.state_dict()

    def resume_point(self) -> ResumePoint:
        averages = 0 if self.ema is None else self.ema.steps
        return ResumePoint(replace(self.position), self.saved_loader, self.schedule.last_epoch, averages)

    def go_back(self, resume_point: ResumePoint) -> None:
        """Rewind the host's state. The device's state is still that of `resume_point`: all later steps were skipped."""
        self.position.move_to(resume_point.position)
        self.saved_loader = resume_point.loader
        move_to(self.schedule, resume_point.schedule_steps)
        if self.ema is not None:
            self.ema.steps = resume_point.ema_steps

    def load_position(
        self, position: Position, loader: dict[str, object], *, allow_other_data: bool
    ) -> tuple[str, ...]:
        """Restore position and loader from a checkpoint. Return notes about changed data, if a change is allowed."""
        notes = self.loader.load_state_dict(loader, allow_other_data=allow_other_data)
        self.position.move_to(position)
        self.saved_loader = self.loader.state_dict()
        return notes

    def wait_for_updates(self) -> None:
        """Make work on the device that is queued from now on find the weights of the last step."""
        if isinstance(self.optimizer, ChunkedAdamW):
            self.optimizer.wait_for_all()

    @contextmanager
    def as_delivered(self) -> Iterator[None]:
        """Inside, the model has the weights that a user gets: EMA or schedule-free averages, if the run keeps any."""
        self.wait_for_updates()
        with averaged(self.optimizer), nullcontext() if self.ema is None else self.ema.swapped():
            yield
