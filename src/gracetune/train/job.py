"""Everything the loop works with, put together by `assembly`. Complete when it is made; what changes while a run goes
on are the objects it owns: the state, the control, the pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from gracetune.cache.batches import Batch, BatchSource
from gracetune.cache.errors import EntriesError
from gracetune.data.backends.errors import UnreadableFilesError
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import by_dataset, left_out_lines
from gracetune.data.loader import EpochEnd, Exhausted
from gracetune.errors import GracetuneError
from gracetune.models.experts import expert_for_step, next_expert
from gracetune.models.spec import ExpertName
from gracetune.optim.batch_ramp import Ramp
from gracetune.seeded_random import torch_seed
from gracetune.train.control import Control, Kind, Stop
from gracetune.train.gradients import Accumulation, GradientClipping, Gradients
from gracetune.train.hooks import StepStarts
from gracetune.train.position import Length, Position
from gracetune.train.runtime import Runtime
from gracetune.train.step import TrainStep
from gracetune.train.trained_model import TrainedModel
from gracetune.train.training_state import TrainingState

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
    trained_model: TrainedModel
    step: TrainStep
    state: TrainingState

    @property
    def device(self) -> torch.device:
        return self.runtime.device


@dataclass(frozen=True, eq=False)
class TrainingJob:
    runtime: Runtime
    trained_model: TrainedModel
    step: TrainStep
    state: TrainingState
    source: BatchSource
    ramp: Ramp
    switch_every: int
    seed: int
    gradients: Mapping[ExpertName, Gradients]
    length: Length
    clip: GradientClipping
    accumulation: Accumulation
    repair: Callable[[EntriesError], None]
    """Makes cache entries again that turned out to be damaged (`cache.repair`)."""
    warn: Callable[[str], None]
    on_epoch_end: Callable[[EpochEnd], None]
    """Called between two batches (`cache_refresh`)."""
    memory_alarm: Callable[[], str | None]
    """Asked before every micro-batch: why the run has to be saved now."""
    first_step: int
    """Where this process began."""
    control: Control
    pauses: Pauses = field(default_factory=Pauses)

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def evaluated(self) -> EvaluatedModel:
        return EvaluatedModel(self.runtime, self.trained_model, self.step, self.state)

    def coming_step(self) -> StepStarts:
        """What the next step is: a function of the position alone."""
        position = self.position
        expert = expert_for_step(position.step, self.switch_every, self.trained_model.trained)
        return StepStarts(replace(position), expert, self.ramp.step_batch(position.micro_batches))

    def next_expert(self) -> ExpertName | None:
        """The expert whose turn begins after the coming step; None where it does not change."""
        return next_expert(self.position.step, self.switch_every, self.trained_model.trained)

    def seed_step(self) -> None:
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
        gathered = self.runtime.all_of(None if own is None else (_CODES[own.kind], self.runtime.rank, own))
        if not gathered:
            return None
        _, rank, stop = max(gathered, key=lambda one: (one[0], -one[1]))
        return stop if self.runtime.world_size == 1 else Stop(stop.kind, f"rank {rank}: {stop.reason}")

    def cannot_go_on(self) -> Stop | None:
        """Before a micro-batch, the same on every rank: memory runs out, and a long window would come too late.

        A process that has done no step has failed: one that was started again because it was interrupted would do none
        either.
        """
        reason = self.memory_alarm()
        kind: Kind = "interrupted" if self.position.step > self.first_step else "failed"
        if reason is not None:
            self.control.ask_to_stop(kind, reason)
        if not self.runtime.highest(int(reason is not None)):
            return None
        return self.control.stop or Stop(kind, "memory is running out on another rank")

    def next_batch(self, size: int) -> Batch | EpochEnd | Exhausted | Stop:
        """A damaged cache entry is made again. A media file that turns out to be damaged is left out, up to its
        dataset's limit; beyond it, or where an entry cannot be made, the run has to stop.

        By all ranks, before the same batch: those whose part of it was sound go back to before it.
        """
        loader, several = self.state.loader, self.runtime.world_size > 1
        while True:
            before = loader.state_dict() if several else None
            outcome = self._try_batch(size)
            found = self.runtime.all_of(outcome if isinstance(outcome, _Trouble) else None)
            if not found and not isinstance(outcome, _Trouble):
                return outcome
            if before is not None:
                loader.load_state_dict(before)
            for reason in sorted(one.reason for one in found if one.path is None):
                return Stop("failed", reason)
            damaged = {(one.dataset, one.path): one.reason for one in found if one.path is not None}
            try:
                loader.exclude(by_dataset(damaged))
            except UnreadableFilesError as error:
                return Stop("failed", str(error))
            for line in left_out_lines(damaged):
                self.warn(line)

    def _try_batch(self, size: int) -> Batch | EpochEnd | Exhausted | _Trouble:
        repaired: set[str] = set()
        while True:
            try:
                return self.source.next(size, step=self.position.step)
            except EntriesError as error:
                damage = error
            except UnreadableMediaError as error:
                return _trouble(error)
            except GracetuneError as error:
                return _Trouble("", None, str(error))
            if repaired.issuperset(damage.keys):
                return _Trouble("", None, f"it was encoded again, and is damaged again: {damage}")
            repaired.update(damage.keys)
            try:
                self.repair(damage)
            except UnreadableMediaError as error:
                return _trouble(error)
            except GracetuneError as error:
                return _Trouble("", None, f"{damage}\nIt could not be encoded again: {error}")


@dataclass(frozen=True)
class _Trouble:
    """Why there is no batch: a media file, or whatever ends the run where `path` is None."""

    dataset: str
    path: str | None
    reason: str


def _trouble(error: UnreadableMediaError) -> _Trouble:
    if error.dataset is None:
        return _Trouble("", None, str(error))
    return _Trouble(error.dataset, error.path, error.reason)
