"""The hooks of the training loop: the `Callback` protocol, and a typed event for each hook.

A callback gets the objects it works with in its constructor (`callbacks.callbacks_of`), and events through its hooks.
It overrides the hooks it needs:

    class Bell(Callback):
        def step_ends(self, done: StepEnds) -> None:
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
from gracetune.train.training_state import Position


@dataclass(frozen=True)
class RunStarts:
    position: Position
    """Where the run starts; step 0 unless it is resumed. All events hold copies of the position."""
    steps: int
    """Length of the whole run in optimizer steps."""


@dataclass(frozen=True)
class StepStarts:
    """An optimizer step is about to begin."""

    position: Position
    expert: ExpertName
    step_batch: StepBatch


@dataclass(eq=False)
class StepEnds:
    """An optimizer step is done. Its tensors are on the device: reading one synchronizes."""

    step: int
    """Optimizer steps done, this one included."""
    expert: ExpertName
    step_batch: StepBatch
    loss: Tensor
    """[]: the sum over this rank's samples."""
    norm: Tensor
    """[]: the gradient norm before clipping, equal on all ranks."""
    skipped: Tensor
    """[]: 1 if the step was skipped because its gradients were not finite, else 0. Outside fp16 it stays 1 for all
    later steps (`TrainingState.take_step`)."""
    samples: int = 0
    """Samples of all ranks together."""
    batches: list[BatchRef] = field(default_factory=list)
    """This rank's micro-batches."""
    epochs: list[EpochEnd] = field(default_factory=list)
    """Epochs that ended in this step."""


@dataclass(frozen=True)
class RunEnds:
    stop: Stop
    position: Position
    """Where the run ended. If a step failed, this is the position before it."""


class Callback(Protocol):
    """Work between optimizer steps. All ranks have the same callbacks in the same order; most act on rank 0 only."""

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
        """After the loop: wait for pending work. Return a `Stop` if that shows that the run has failed."""
        return None

    def end(self, ended: RunEnds) -> None:
        """After the last step, for any reason of stopping."""
        return
