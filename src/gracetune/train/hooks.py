"""What a callback is told, and when: one Protocol, and a typed event for each of its hooks.

A callback is given what it works with when it is made (`callbacks.callbacks_of`), and events afterwards. It overrides
the hooks it needs:

    class Bell(Callback):
        def window(self, done: WindowDone) -> None:
            if done.step % 100 == 0:
                print("\\a", end="")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gracetune.data.loader import EpochEnd
from gracetune.data.refs import BatchRef
from gracetune.models.spec import ExpertName
from gracetune.optim.batch_ramp import StepBatch
from gracetune.train.control import Stop
from gracetune.train.position import Position


@dataclass(frozen=True)
class RunStarts:
    position: Position
    """Where the run begins; at step 0 unless it is resumed. A copy, as in the other events."""
    steps: int
    """Of the whole run."""


@dataclass(frozen=True)
class StepStarts:
    """An optimizer step begins: whose turn it is, and of how many micro-batches."""

    position: Position
    expert: ExpertName
    step_batch: StepBatch


@dataclass(eq=False)
class StepEnds:
    """One window, after its optimizer step. Tensors stay on the device: who reads one waits for it."""

    step: int
    """Windows done, this one included."""
    expert: ExpertName
    step_batch: StepBatch
    loss: Tensor
    """This rank's sum over its samples."""
    norm: Tensor
    skipped: Tensor
    """1 where the step was left out, because gradients were not finite."""
    samples: int = 0
    """Over all ranks."""
    batches: list[BatchRef] = field(default_factory=list)
    epochs: list[EpochEnd] = field(default_factory=list)
    """Those that ended in this window."""


@dataclass(frozen=True)
class RunEnds:
    stop: Stop
    position: Position
    """Of what is kept: before a window that has failed."""


class Callback(Protocol):
    """Anything periodic. All ranks have the same ones in the same order; most do something on rank 0 only."""

    def start(self, begun: RunStarts) -> None:
        """Before the first step."""
        return

    def step_starts(self, coming: StepStarts) -> None:
        """Before every step."""
        return

    def step_ends(self, done: StepEnds) -> None:
        """After every optimizer step."""
        return

    def settle(self) -> Stop | None:
        """When the loop has ended: wait for what is still under way. Why the run has failed, if that shows only now."""
        return None

    def end(self, ended: RunEnds) -> None:
        """After the last step, whatever ended the run."""
        return
