"""How far a run has come, and how far it is to go. Pure but for the one object that is counted up."""

from __future__ import annotations

from dataclasses import dataclass

from gracetune.data.index import DataIndex
from gracetune.optim.ramp import Ramp


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


@dataclass(frozen=True)
class Length:
    """How many optimizer windows a run has, and how we know."""

    steps: int
    reason: str


def length_of(index: DataIndex, ramp: Ramp, *, batch_size: int, max_steps: int | None, epochs: int | None) -> Length:
    """`epochs` are counted out by going through their batches as the run will, without looking at any sample."""
    if max_steps is not None:
        return Length(max_steps, "as asked")
    if epochs is None:
        raise ValueError("neither steps nor epochs: config.rules lets no such config pass")
    order = index.order(batch_size)
    cursor = order.start()
    micro_batches = steps = filled = 0
    window = ramp.window(0)
    while cursor.epoch < epochs:
        drawn = order.draw(cursor, window.micro_batch, steps, ramp.world_size)
        if drawn is None:
            if not cursor.batches:
                break  # no dataset is active any more
            cursor = order.next_epoch(cursor)
            continue
        cursor = drawn[1]
        micro_batches, filled = micro_batches + 1, filled + 1
        if filled == window.accumulation:
            steps, filled = steps + 1, 0
            window = ramp.window(micro_batches)
    steps += filled > 0  # the last window may be short
    return Length(steps, f"{epochs} epochs of {micro_batches} micro-batches in all")
