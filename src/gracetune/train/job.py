"""`TrainingJob`: everything the training loop works with.

`assembly.assemble` builds it. The job itself is frozen; only its members `state`, `control` and `pauses` change during
a run.
"""

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
from gracetune.train.runtime import Runtime
from gracetune.train.step import TrainStep
from gracetune.train.trained_model import TrainedModel
from gracetune.train.training_state import Length, Position, TrainingState

_PRIORITY = {"finished": 1, "failed": 2, "interrupted": 3}
"""If ranks stop for different reasons, the one with the highest number is reported."""


class Pauses:
    """Time spent between steps on validation, checks and saving. It does not count as step time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """In total, since the run began."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """The parts of a job that validation and checks need to run the model between two steps."""

    runtime: Runtime
    trained_model: TrainedModel
    step: TrainStep
    state: TrainingState

    @property
    def device(self) -> torch.device:
        return self.runtime.device


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """A run that is ready for its next step."""

    runtime: Runtime
    trained_model: TrainedModel
    step: TrainStep
    state: TrainingState
    source: BatchSource
    ramp: Ramp
    switch_every: int
    """Optimizer steps after which the other expert is trained."""
    seed: int
    gradients: Mapping[ExpertName, Gradients]
    length: Length
    """How many optimizer steps the whole run has."""
    clip: GradientClipping
    accumulation: Accumulation
    repair: Callable[[EntriesError], None]
    """Encodes damaged cache entries again (`cache.session.EntryRepair`)."""
    warn: Callable[[str], None]
    on_epoch_end: Callable[[EpochEnd], None]
    """Called between two batches, on every rank (`cache_refresh`)."""
    memory_alarm: Callable[[], str | None]
    """Called before every micro-batch. Returns why the run has to be saved and stopped now, or None."""
    first_step: int
    """Optimizer steps that were done when this process started; above 0 after a resume."""
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

    def next_step(self) -> StepStarts:
        """The next step's expert and batch size. Both follow from the position alone."""
        position = self.position
        expert = expert_for_step(position.step, self.switch_every, self.trained_model.trained)
        return StepStarts(replace(position), expert, self.ramp.step_batch(position.micro_batches))

    def next_expert(self) -> ExpertName | None:
        """The expert that takes over after the next step; None if it stays the same."""
        return next_expert(self.position.step, self.switch_every, self.trained_model.trained)

    def seed_step(self) -> None:
        """Seed torch's generator from the step and the rank, so that dropout repeats after a resume."""
        # The text is part of the seed. Another one would give other random values.
        torch.manual_seed(torch_seed(self.seed, "window", self.position.step, self.runtime.rank))

    def agreed_stop(self) -> Stop | None:
        """Why the run ends now, or None. All ranks return the same decision."""
        own = self.control.stop
        if self.position.step >= self.length.steps:
            # The run is complete. Only a failure that the last step revealed still matters.
            if not self.runtime.highest(int(own is not None and own.kind == "failed")):
                return Stop("finished", f"{self.position.step} steps")
            return own if own is not None and own.kind == "failed" else Stop("failed", "another rank has failed")
        gathered = self.runtime.all_of(None if own is None else (_PRIORITY[own.kind], self.runtime.rank, own))
        if not gathered:
            return None
        _, rank, stop = max(gathered, key=lambda one: (one[0], -one[1]))
        return stop if self.runtime.world_size == 1 else Stop(stop.kind, f"rank {rank}: {stop.reason}")

    def stop_for_memory(self) -> Stop | None:
        """A stop if host memory is running out on any rank. All ranks return the same decision.

        It is checked before every micro-batch, because a step of many micro-batches may take too long. A process that
        has not completed a step reports "failed", not "interrupted": a restart would stop at the same place.
        """
        reason = self.memory_alarm()
        kind: Kind = "interrupted" if self.position.step > self.first_step else "failed"
        if reason is not None:
            self.control.ask_to_stop(kind, reason)
        if not self.runtime.highest(int(reason is not None)):
            return None
        return self.control.stop or Stop(kind, "memory is running out on another rank")

    def next_batch(self, size: int) -> Batch | EpochEnd | Exhausted | Stop:
        """Load this rank's part of the next micro-batch, which has `size` samples on each rank.

        A damaged cache entry is encoded again. A damaged media file is left out, up to its dataset's limit. Beyond that
        limit, or if an entry cannot be encoded, the result is a `Stop`.

        All ranks leave out the same files and stop at the same batch: if one rank has no batch, the others rewind their
        loaders and load the batch again.
        """
        loader, several = self.state.loader, self.runtime.world_size > 1
        while True:
            before = loader.state_dict() if several else None
            outcome = self._try_batch(size)
            found = self.runtime.all_of(outcome if isinstance(outcome, _NoBatch) else None)
            if not found and not isinstance(outcome, _NoBatch):
                return outcome
            if before is not None:
                loader.load_state_dict(before)
            for reason in sorted(one.reason for one in found if one.path is None):
                return Stop("failed", reason)
            # Here every reason is a damaged file.
            damaged = {(one.dataset, one.path): one.reason for one in found if one.path is not None}
            try:
                loader.exclude(by_dataset(damaged))
            except UnreadableFilesError as error:
                return Stop("failed", str(error))
            for line in left_out_lines(damaged):
                self.warn(line)

    def _try_batch(self, size: int) -> Batch | EpochEnd | Exhausted | _NoBatch:
        repaired: set[str] = set()  # an entry that is damaged again after its repair stops the run
        while True:
            try:
                return self.source.next(size, step=self.position.step)
            except EntriesError as error:
                damage = error
            except UnreadableMediaError as error:
                return _no_batch(error)
            except GracetuneError as error:
                return _NoBatch(dataset="", path=None, reason=str(error))
            if repaired.issuperset(damage.keys):
                return _NoBatch(dataset="", path=None, reason=f"it was encoded again, and is damaged again: {damage}")
            repaired.update(damage.keys)
            try:
                self.repair(damage)
            except UnreadableMediaError as error:
                return _no_batch(error)
            except GracetuneError as error:
                return _NoBatch(dataset="", path=None, reason=f"{damage}\nIt could not be encoded again: {error}")


@dataclass(frozen=True)
class _NoBatch:
    """Why there is no batch: a damaged media file, or, if `path` is None, an error that ends the run."""

    dataset: str
    path: str | None
    reason: str


def _no_batch(error: UnreadableMediaError) -> _NoBatch:
    if error.dataset is None:
        return _NoBatch(dataset="", path=None, reason=str(error))
    return _NoBatch(error.dataset, error.path, error.reason)
