"""How far a run has come, and how far it is to go. Pure but for the one object that is counted up."""

from __future__ import annotations

from dataclasses import dataclass

from gracetune.data.index import DataIndex
from gracetune.data.sampler import Order
from gracetune.optim.batch_ramp import Ramp


@dataclass
class Position:
    """Counted at the end of every window, the same on all ranks; whole windows only."""

    step: int = 0
    """Optimizer windows done. Whose turn it is follows from this alone."""
    micro_batches: int = 0
    """Of one rank: what the ramp follows."""
    samples: int = 0
    """Over all ranks."""
    epoch: int = 0
    """Of the next batch, counted from 0."""

    def move_to(self, other: Position) -> None:
        """Whoever holds this object sees it move."""
        self.step, self.micro_batches = other.step, other.micro_batches
        self.samples, self.epoch = other.samples, other.epoch


@dataclass(frozen=True)
class Length:
    """How many optimizer windows a run has, and how we know."""

    steps: int
    reason: str


def length_of(index: DataIndex, ramp: Ramp, *, batch_size: int, max_steps: int | None, epochs: int | None) -> Length:
    """`epochs` are counted out as the run will go through them, without looking at any sample."""
    if max_steps is not None:
        return Length(max_steps, "as asked")
    if epochs is None:
        raise ValueError("neither steps nor epochs: config.rules lets no such config pass")
    order = index.order(batch_size)
    by_step = order.alternates or any(source.start_step or source.end_step is not None for source in order.sources)
    steps, micro_batches = (_walked if by_step or ramp.ramp_steps else _counted)(order, ramp, epochs)
    return Length(steps, f"{epochs} epochs of {micro_batches} micro-batches in all")


def _counted(order: Order, ramp: Ramp, epochs: int) -> tuple[int, int]:
    """Steps and micro-batches where nothing depends on the step: an epoch's batches are known without drawing them."""
    step_batch, micro_batches = ramp.step_batch(0), 0
    for epoch in range(epochs):
        batches = order.whole_epoch(epoch, step_batch.micro_batch, 0, ramp.world_size).batches
        if not batches:
            break  # no dataset is active any more
        micro_batches += batches
    return -(-micro_batches // step_batch.accumulation), micro_batches  # the last window may be short


def _walked(order: Order, ramp: Ramp, epochs: int) -> tuple[int, int]:
    """The same where windows grow, or datasets come and go with the steps."""
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
