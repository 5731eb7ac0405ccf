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

from gracetune.data.loader import Loader
from gracetune.optim.averages import EmaWeights, averaged
from gracetune.optim.schedules import move_to
from gracetune.optim.step_skipping import step_unless
from gracetune.train.gradients import LossScale, NoScale
from gracetune.train.position import Position


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

    @contextmanager
    def as_delivered(self) -> Iterator[None]:
        """Inside, the model has the weights that a user gets: EMA or schedule-free averages, if the run keeps any."""
        with averaged(self.optimizer), nullcontext() if self.ema is None else self.ema.swapped():
            yield
