"""The position of a run, and its length. `Position` is the only mutable object here."""

from __future__ import annotations

from dataclasses import dataclass

from gracetune.data.index import DataIndex
from gracetune.data.sampler import Order
from gracetune.optim.batch_ramp import Ramp


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
        batches = order.whole_epoch(epoch, step_batch.micro_batch, 0, ramp.world_size).batches
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
