"""The measured step: that of a run, from cache entries in memory to the optimizer.

It calls `load_trained_model`, `assembly` and `run_step`, as `gracetune train` does. Only the weights and entries are
random, and nothing is logged, saved or sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.bench.step.job import StepJob
from gracetune.bench.step.random_data import random_data
from gracetune.bench.step.random_model import RandomModel
from gracetune.cache.batches import LiveEncoder
from gracetune.cache.errors import EntriesError
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.hardware import Machine
from gracetune.optim.chunked_adamw import StateChoice
from gracetune.planning.activations import BUDGETS, RecomputePolicy
from gracetune.planning.memory_tiers import CONTEXT_BYTES, FRAGMENTATION, HEADROOM
from gracetune.train.assembly import assemble, build_initial_state, open_host
from gracetune.train.control import Control, Stop
from gracetune.train.data import CachedSamples, open_source
from gracetune.train.job import TrainingJob
from gracetune.train.loop import run_step
from gracetune.train.planning import PlannedRun, choose, make_plan, reject_misfit
from gracetune.train.runtime import Runtime
from gracetune.train.trained_model import DenoiserChoices, TrainedModel, load_trained_model
from gracetune.train.view import CollectingView, View


@dataclass(frozen=True)
class StepChoices:
    """The decisions about the step, and their reasons."""

    planned: PlannedRun
    choices: DenoiserChoices
    reasons: tuple[str, ...]

    @property
    def policy(self) -> RecomputePolicy:
        if self.choices.checkpointing:
            return "full"
        budget = self.choices.memory_budget
        return "off" if budget is None else next(policy for policy, part in BUDGETS.items() if float(part) == budget)

    @property
    def estimated_peak(self) -> int | None:
        """The expected peak of torch's memory counter; None if the plan does not apply."""
        if self.planned.mismatch is not None:
            return None
        one = self.planned.demand.settings.precision == "fp8" and self.choices.fp8_layouts == "one"
        precision, parked = "fp8 one layout" if one else None, self.choices.park_inputs
        return self.planned.demand.training_peak(self.policy, precision, parked=parked)


def decide(
    job: StepJob, config: RunConfig, machine: Machine, model: RandomModel, device: torch.device
) -> StepChoices:  # fmt: skip
    """Plan and choose as a run does. Raises ConfigError if the job does not fit."""
    limited = machine if job.memory_limit is None else with_limit(machine, job.memory_limit)
    planned = make_plan(config, limited, model.spec, model.source, model.facts)
    reject_misfit(planned, allowed=False)
    choices, reasons = choose(config, planned, model.spec.attention, device, torch.bfloat16, shapes=1)
    return StepChoices(planned, choices, reasons)


def with_limit(machine: Machine, limit: int) -> Machine:
    """`machine` with a GPU on which a plan may use exactly `limit` bytes of torch's counter. Inverts the planner's
    allowance for the context, fragmentation and headroom."""
    total = int((limit * (1 + FRAGMENTATION) + CONTEXT_BYTES) / (1 - HEADROOM)) + 1
    gpus = tuple(gpu.model_copy(update={"memory_total": total, "memory_free": total}) for gpu in machine.gpus)
    return machine.model_copy(update={"gpus": gpus})


class Trainer:
    """A run that is ready to take steps."""

    def __init__(self, job: TrainingJob, view: CollectingView) -> None:
        self.job, self._view = job, view

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that the run has shown so far."""
        return tuple(self._view.lines)

    @property
    def trained_model(self) -> TrainedModel:
        return self.job.trained_model

    def step(self) -> Tensor:
        """Take one optimizer step; returns its loss per sample, on the device."""
        done = run_step(self.job)
        if isinstance(done, Stop):
            raise GracetuneError(f"the run ended in the middle of the measurement: {done.reason}")
        return done.loss / done.samples


@contextmanager
def trainer(
    job: StepJob, config: RunConfig, decided: StepChoices, machine: Machine, model: RandomModel, runtime: Runtime
) -> Iterator[Trainer]:
    with ExitStack() as stack:
        host = open_host(config, decided.planned, machine, runtime, None, model.facts)
        trained_model = load_trained_model(
            config, model.spec, model.source, model.facts, runtime, decided.choices, host
        )
        ready = random_data(job, config, model, pinned=runtime.device.type == "cuda")
        view = CollectingView()
        yield Trainer(assemble_unresumed(config, trained_model, ready, runtime, view, stack), view)


def assemble_unresumed(
    config: RunConfig, trained_model: TrainedModel, ready: CachedSamples, runtime: Runtime, view: View,
    stack: ExitStack, state: StateChoice | None = None,
) -> TrainingJob:  # fmt: skip
    """A training job at step 0 without callbacks, for measuring steps. `state` is as in `build_initial_state`."""
    initial, live = build_initial_state(config, trained_model, ready.index, runtime, view, state), LiveEncoder()
    source = open_source(ready, initial.state.loader, live, runtime, None, stack, on_decision=view.report)
    return assemble(
        config, trained_model, ready, live, initial, source, runtime, None, Control(), view,
        on_epoch_end=lambda ended: None, memory_alarm=lambda: None, repair=_cannot_repair,
    )  # fmt: skip


def _cannot_repair(error: EntriesError) -> None:
    """Random entries exist only in memory, so a broken one cannot be encoded again."""
    raise error
