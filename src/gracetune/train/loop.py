"""The loop: windows of micro-batches, one optimizer step each, until the run is over or somebody asks it to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from gracetune.cache.batches import Batch
from gracetune.data.loader import EpochEnd, Exhausted
from gracetune.models.spec import ExpertName
from gracetune.train.control import Stop
from gracetune.train.gradients import gradient_factor
from gracetune.train.hooks import Callback, RunEnds, RunStarts, StepEnds
from gracetune.train.job import TrainingJob


def fit(job: TrainingJob, callbacks: Sequence[Callback]) -> Stop:
    """Until `job.length` windows are done, the data is exhausted, or a stop was asked for. All ranks end together."""
    for callback in callbacks:
        callback.start(RunStarts(replace(job.position), job.length.steps))
    while (stop := job.agreed_stop()) is None:
        for callback in callbacks:
            callback.step_starts(job.coming_step())
        done = run_step(job)
        if isinstance(done, Stop):
            stop = done
            break
        for callback in callbacks:
            callback.step_ends(done)
    failures = [callback.settle() for callback in callbacks]
    stop = next((failure for failure in failures if failure is not None), stop)
    job.trained_model.host.settle()  # an expert that was on its way to a window that did not begin
    for callback in callbacks:
        callback.end(RunEnds(stop, replace(job.position)))
    return stop


def run_step(job: TrainingJob) -> StepEnds | Stop:
    """A stop where no batch is left, or memory does not last until the window's end: what was begun leaves no trace."""
    job.seed_step()
    turn = job.coming_step()
    step_batch, expert = turn.step_batch, turn.expert
    denoiser = job.trained_model.host.activate(expert, at_once=False)
    if (coming := job.next_expert()) is not None:
        job.trained_model.host.prepare(coming)
    gradients = job.gradients[expert]
    gradients.open()
    nothing = torch.zeros((), device=job.device)
    done = StepEnds(job.position.step + 1, expert, step_batch, nothing, torch.zeros(()), job.state.skipped)
    while len(done.batches) < step_batch.accumulation:
        if (stop := job.cannot_go_on()) is not None:
            gradients.close()
            return stop
        outcome = job.next_batch(step_batch.micro_batch)
        if isinstance(outcome, Exhausted):
            break
        if isinstance(outcome, Stop):
            gradients.close()
            return outcome
        if isinstance(outcome, EpochEnd):
            job.on_epoch_end(outcome)
            done.epochs.append(outcome)
            continue
        _learn(job, denoiser, outcome, done, coming if len(done.batches) + 1 == step_batch.accumulation else None)
    if not done.batches:
        gradients.close()
        return Stop("finished", "the data is exhausted")
    factor = gradient_factor(job.accumulation, micro_batches=len(done.batches), samples=done.samples)
    done.norm = gradients.finish(job.state.scale.factor * factor, job.clip)
    job.state.take_step(done.norm)
    done.skipped = job.state.skipped
    gradients.close()
    job.state.advance(len(done.batches), done.samples)
    return done


def _learn(job: TrainingJob, denoiser: nn.Module, batch: Batch, done: StepEnds, coming: ExpertName | None) -> None:
    with (
        job.trained_model.strength_for(batch, done.expert),
        job.trained_model.host.following(coming),
    ):  # backward may repeat blocks
        loss = job.step(denoiser, batch, done.expert)
        job.state.scale.scaled(loss.total).backward()
    job.gradients[done.expert].collect()
    done.loss += loss.total.detach()
    done.samples += batch.ref.global_samples
    done.batches.append(batch.ref)
