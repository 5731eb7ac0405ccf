"""Everything the loop works with, put together by `assembly`. Complete when it is made; what changes while a run goes
on are the objects it owns: the state, the control, the pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from gracetune.cache.batches import Batch, BatchSource
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.loader import EpochEnd, Exhausted
from gracetune.models.experts import expert_for_window, next_expert
from gracetune.models.spec import ExpertName
from gracetune.optim.ramp import Ramp
from gracetune.seeded_random import torch_seed
from gracetune.train.control import Control, Stop
from gracetune.train.gradients import Accumulation, Clip, Gradients
from gracetune.train.hooks import StepStarts
from gracetune.train.position import Length, Position
from gracetune.train.runtime import Runtime
from gracetune.train.state import TrainingState
from gracetune.train.step import TrainStep
from gracetune.train.trainee import Trainee

_CODES = {"finished": 1, "failed": 2, "interrupted": 3}


class Pauses:
    """Time that is no time of a step: validation, checks, saving."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Since the run began."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """What it takes to ask the trained model something between two steps."""

    runtime: Runtime
    trainee: Trainee
    step: TrainStep
    state: TrainingState

    @property
    def device(self) -> torch.device:
        return self.runtime.device


@dataclass(frozen=True, eq=False)
class Job:
    runtime: Runtime
    trainee: Trainee
    step: TrainStep
    state: TrainingState
    source: BatchSource
    ramp: Ramp
    switch_every: int
    seed: int
    gradients: Mapping[ExpertName, Gradients]
    length: Length
    clip: Clip
    accumulation: Accumulation
    encodes_live: bool
    """Media is decoded while training, so that a damaged file may turn up at any batch."""
    warn: Callable[[str], None]
    on_epoch_end: Callable[[EpochEnd], None]
    """Called between two batches (`renewal`)."""
    memory_alarm: Callable[[], str | None]
    """Asked before every micro-batch: why the run has to be saved now."""
    control: Control = field(default_factory=Control)
    pauses: Pauses = field(default_factory=Pauses)

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def evaluated(self) -> EvaluatedModel:
        return EvaluatedModel(self.runtime, self.trainee, self.step, self.state)

    def coming_step(self) -> StepStarts:
        """What the next step is: a function of the position alone."""
        position = self.position
        expert = expert_for_window(position.step, self.switch_every, self.trainee.trained)
        return StepStarts(replace(position), expert, self.ramp.window(position.micro_batches))

    def next_expert(self) -> ExpertName | None:
        """The expert whose turn begins after the coming step; None where it does not change."""
        return next_expert(self.position.step, self.switch_every, self.trainee.trained)

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

    def next_batch(self, size: int) -> Batch | EpochEnd | Exhausted:
        """A file that turns out to be damaged when it is decoded is left out, up to its dataset's limit.

        By all ranks, before the same batch: those whose part of it was sound go back to before it.
        """
        if not self.encodes_live:
            return self.source.next(size, step=self.position.step)
        loader = self.state.loader
        while True:
            before = loader.state_dict()
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
            loader.load_state_dict(before)
            for dataset, path, reason in sorted(set(found)):
                loader.exclude(dataset, {path: reason})
                self.warn(f"left out, unreadable: {path} of {dataset}: {reason}")
