"""What an optimizer step changes beside the weights: the optimizer, its schedule, averages, and how far the run is.

A checkpoint saves all of it (`chunks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gracetune.data.loader import Loader
from gracetune.optim.ema import EmaWeights
from gracetune.optim.schedule_free import averaged
from gracetune.optim.schedules import move_to
from gracetune.optim.step_skipping import step_unless
from gracetune.train.loss_scale import LossScale, NoScale
from gracetune.train.position import Position


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stood between two windows: what the host counts. All else of its state is on the device."""

    position: Position
    loader: dict[str, object]
    schedule_steps: int
    ema_steps: int


class TrainingState:
    """One object for the whole run. Its `position` is one too: whoever holds it sees how far the run is."""

    def __init__(
        self, optimizer: Optimizer, schedule: LambdaLR, scale: LossScale | NoScale, ema: EmaWeights | None,
        loader: Loader,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`ema` is None for a run without averages."""
        self.optimizer, self.schedule, self.scale, self.ema = optimizer, schedule, scale, ema
        self.loader = loader
        self.position = Position()
        self.saved_loader = loader.state_dict()
        """The loader's state at the last window's end: a stop inside a window goes back to there."""
        self.skipped: Tensor = torch.zeros((), device=device)
        """On the device: 1 where steps are left out (`optim.step_skipping`)."""

    def take_step(self, norm: Tensor) -> None:
        """Gradients that are not finite change nothing: neither weights nor the optimizer's state nor averages.

        Such a window ends the run, and those that follow until the host hears of it change nothing either. In fp16 it
        is an ordinary event, and the next one counts again.
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
        """To where the device's state still is: of the windows since then all steps were left out."""
        self.position.move_to(resume_point.position)
        self.saved_loader = resume_point.loader
        move_to(self.schedule, resume_point.schedule_steps)
        if self.ema is not None:
            self.ema.steps = resume_point.ema_steps

    def load_position(
        self, position: Position, loader: dict[str, object], *, allow_other_data: bool
    ) -> tuple[str, ...]:
        """From a checkpoint. What differs in the data, where that is allowed."""
        notes = self.loader.load_state_dict(loader, allow_other_data=allow_other_data)
        self.position.move_to(position)
        self.saved_loader = self.loader.state_dict()
        return notes

    @contextmanager
    def as_delivered(self) -> Iterator[None]:
        """Inside, the model has the weights a user gets: the averages, where the run keeps some."""
        with averaged(self.optimizer), nullcontext() if self.ema is None else self.ema.swapped():
            yield
