"""Everything the loop works with, put together by `run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gracetune.cache.batches import Batch, BatchSource
from gracetune.data.draws import draw
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.models.spec import ExpertName
from gracetune.optim.ema import Ema
from gracetune.optim.ramp import Ramp
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
    schedule: LRScheduler
    length: Length
    clip: Clip
    scale: LossScale | NoScale
    ema: Ema | None = None
    position: Position = field(default_factory=Position)
    control: Control = field(default_factory=Control)
    callbacks: Sequence[Callback] = ()
    on_epoch_end: Callable[[EpochEnd], None] = lambda ended: None
    warn: Callable[[str], None] = lambda text: None
    memory_alarm: Callable[[], str | None] = lambda: None
    """Asked before every micro-batch: why the run has to be saved now."""
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
        torch.manual_seed(draw(self.seed, "window", self.position.step, self.runtime.rank) >> 1)

    def agreed_stop(self) -> Stop | None:
        """The same answer on every rank, for the same window."""
        if self.position.step >= self.length.steps:
            return Stop("finished", f"{self.position.step} steps")
        own = self.control.stop
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
        optimizer: Any = self.optimizer
        averages = hasattr(optimizer, "eval") and hasattr(optimizer, "train")  # schedule-free optimizers have both
        with ExitStack() as stack:
            if averages:
                optimizer.eval()
                stack.callback(optimizer.train)
            if self.ema is not None:
                stack.enter_context(self.ema.swapped())
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
        """Nothing is done with gradients that are not finite where that can be known without waiting for a GPU."""
        known_bad = (norm.device.type == "cpu" or self.scale.skips) and not bool(norm.isfinite())
        if not known_bad:
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update()
        self.scale.update(norm)
        self.schedule.step()

    def advance(self, micro_batches: int, samples: int) -> None:
        self.position.step += 1
        self.position.micro_batches += micro_batches
        self.position.samples += samples
        self.position.epoch = self.loader.epoch
        self.saved_loader = self.loader.state_dict()
