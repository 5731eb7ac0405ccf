"""Everything the loop works with, put together by `run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gracetune.cache.batches import Batch, BatchSource
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.models.spec import ExpertName
from gracetune.optim.averages import averaged
from gracetune.optim.ema import Ema
from gracetune.optim.ramp import Ramp, Window
from gracetune.optim.schedules import move_to
from gracetune.optim.skipping import step_unless
from gracetune.seeded_random import torch_seed
from gracetune.train.control import Control, Stop
from gracetune.train.gradients import Clip, Gradients
from gracetune.train.position import Length, Position
from gracetune.train.runtime import Runtime
from gracetune.train.scaling import LossScale, NoScale
from gracetune.train.step import TrainStep
from gracetune.train.trainee import Trainee

if TYPE_CHECKING:
    from gracetune.train.loop import WindowDone

_CODES = {"finished": 1, "failed": 2, "interrupted": 3}


class Callback(Protocol):
    """Anything periodic. All ranks have the same ones in the same order; most do something on rank 0 only."""

    def start(self, job: Job) -> None: ...

    def window(self, job: Job, done: WindowDone) -> None: ...

    def end(self, job: Job, stop: Stop) -> None: ...


@dataclass(frozen=True)
class Standing:
    """Where a run stood between two windows: what the host counts. All else of its state is on the device."""

    position: Position
    loader: dict[str, object]
    schedule_steps: int
    ema_steps: int


@dataclass(eq=False)
class Job:
    runtime: Runtime
    trainee: Trainee
    step: TrainStep
    loader: Loader
    source: BatchSource
    ramp: Ramp
    switch_every: int
    seed: int
    gradients: Mapping[ExpertName, Gradients]
    optimizer: Optimizer
    schedule: LambdaLR
    length: Length
    clip: Clip
    scale: LossScale | NoScale
    ema: Ema | None = None
    position: Position = field(default_factory=Position)
    control: Control = field(default_factory=Control)
    callbacks: Sequence[Callback] = ()
    on_epoch_end: Callable[[EpochEnd], None] = lambda ended: None
    on_step_start: Callable[[ExpertName, Window], None] = lambda expert, window: None
    """Called as an optimizer step begins, with the expert it trains and its micro-batches."""
    warn: Callable[[str], None] = lambda text: None
    memory_alarm: Callable[[], str | None] = lambda: None
    """Asked before every micro-batch: why the run has to be saved now."""
    settle: Callable[[], Stop | None] = lambda: None
    """Wait until every window's gradients are judged; why the run has failed, if it has. It then stands before that."""
    check_saved: Callable[[Sequence[Path]], str | None] = lambda files: None
    """Given the files just saved, one for each trained expert, inside `as_delivered`: why one of them is wrong."""
    example: Batch | None = None
    """One sample of the first batch, kept for checks; set by `dry.dry_batch`."""
    bad: Tensor | None = None
    """On the device: 1 where steps are left out (`optim.skipping`)."""
    encodes_live: bool = False
    """Media is decoded while training, so that a damaged file may turn up at any batch."""
    paused_seconds: float = 0.0
    """Spent on validation and saving since the run began."""
    saved_loader: dict[str, object] = field(default_factory=dict)
    """The loader's state at the last window's end: a stop inside a window goes back to there."""

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def seed_window(self) -> None:
        """What a layer draws by itself (dropout) depends on the window and the rank, and on nothing before them."""
        torch.manual_seed(torch_seed(self.seed, "window", self.position.step, self.runtime.rank))

    def agreed_stop(self) -> Stop | None:
        """The same answer on every rank, for the same window."""
        own = self.control.stop
        if self.position.step >= self.length.steps:
            # The last step can show that a run has failed. Any other request comes too late to matter.
            if not self.runtime.highest(int(own is not None and own.kind == "failed")):
                return Stop("finished", f"{self.position.step} steps")
            return own if own is not None and own.kind == "failed" else Stop("failed", "another rank has failed")
        code = self.runtime.highest(0 if own is None else _CODES[own.kind])
        if code == 0 or own is not None:
            return own
        kind = next(name for name, number in _CODES.items() if number == code)
        return Stop(kind, "another rank was asked to stop")  # type: ignore[arg-type]

    def cannot_go_on(self) -> Stop | None:
        """Before a micro-batch, the same on every rank: memory runs out, and a long window would come too late."""
        reason = self.memory_alarm()
        if reason is not None:
            self.control.ask_to_stop("interrupted", reason)
        if not self.runtime.highest(int(reason is not None)):
            return None
        return self.control.stop or Stop("interrupted", "memory is running out on another rank")

    @contextmanager
    def as_delivered(self) -> Iterator[None]:
        """Inside, the model has the weights a user gets: the averages, where the run keeps some."""
        with averaged(self.optimizer), nullcontext() if self.ema is None else self.ema.swapped():
            yield

    def next_batch(self, size: int) -> Batch | EpochEnd | Exhausted:
        """A file that turns out to be damaged when it is decoded is left out, up to its dataset's limit.

        By all ranks, before the same batch: those whose part of it was sound go back to before it.
        """
        if not self.encodes_live:
            return self.source.next(size, step=self.position.step)
        while True:
            before = self.loader.state_dict()
            damaged: tuple[str, str, str] | None = None
            try:
                outcome = self.source.next(size, step=self.position.step)
            except UnreadableMediaError as error:
                if error.dataset is None:
                    raise
                damaged = (error.dataset, error.path, error.reason)
            found = self.runtime.all_of(damaged)
            if not found:
                return outcome
            self.loader.load_state_dict(before)
            for dataset, path, reason in sorted(set(found)):
                self.loader.exclude(dataset, {path: reason})
                self.warn(f"left out, unreadable: {path} of {dataset}: {reason}")

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Time in here is no time of a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paused_seconds += time.perf_counter() - began

    def take_step(self, norm: Tensor) -> None:
        """Gradients that are not finite change nothing: neither weights nor the optimizer's state nor averages.

        Such a window ends the run, and those that follow until the host hears of it change nothing either. In fp16 it
        is an ordinary event, and the next one counts again.
        """
        found = (~norm.isfinite()).float()
        self.bad = found if self.bad is None or self.scale.skips else torch.maximum(self.bad, found)
        step_unless(self.optimizer, self.bad)
        if self.ema is not None:
            self.ema.update(self.bad)
        self.scale.update(norm)
        self.schedule.step()

    def standing(self) -> Standing:
        averaged = 0 if self.ema is None else self.ema.steps
        return Standing(replace(self.position), self.saved_loader, self.schedule.last_epoch, averaged)

    def go_back(self, standing: Standing) -> None:
        """To where the device's state still is: of the windows since then all steps were left out."""
        self.position, self.saved_loader = replace(standing.position), standing.loader
        move_to(self.schedule, standing.schedule_steps)
        if self.ema is not None:
            self.ema.steps = standing.ema_steps

    def advance(self, micro_batches: int, samples: int) -> None:
        self.position.step += 1
        self.position.micro_batches += micro_batches
        self.position.samples += samples
        self.position.epoch = self.loader.epoch
        self.saved_loader = self.loader.state_dict()
