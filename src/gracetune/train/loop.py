"""The training loop: accumulate micro-batches, take an optimizer step, call the callbacks, until the run stops."""

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
    """Train until all steps are done, the data is exhausted or a stop is requested. All ranks stop at the same step."""
    for callback in callbacks:
        callback.start(RunStarts(replace(job.position), job.length.steps))
    while (stop := job.agreed_stop()) is None:
        for callback in callbacks:
            callback.step_starts(job.next_step())
        done = run_step(job)
        if isinstance(done, Stop):
            stop = done
            break
        for callback in callbacks:
            callback.step_ends(done)
    # The host runs ahead of the GPU: a failure of the last steps may only show now.
    failures = [callback.settle() for callback in callbacks]
    stop = next((failure for failure in failures if failure is not None), stop)
    job.trained_model.host.settle()  # the active expert may still be in transfer, for a step that did not run
    for callback in callbacks:
        callback.end(RunEnds(stop, replace(job.position)))
    return stop


def run_step(job: TrainingJob) -> StepEnds | Stop:
    """Take one optimizer step.

    Return a `Stop` if no batch is left, a batch cannot be loaded or memory runs out. The weights, the optimizer and the
    position are then as they were before this step.
    """
    job.seed_step()
    starts = job.next_step()
    step_batch, expert = starts.step_batch, starts.expert
    denoiser = job.trained_model.host.activate(expert, at_once=False)
    if (following := job.next_expert()) is not None:
        job.trained_model.host.prepare(following)  # if there is room, its weights arrive while this step computes
    gradients = job.gradients[expert]
    gradients.open()
    loss = torch.zeros((), device=job.device)  # sum over this rank's samples
    step, norm = job.position.step + 1, torch.zeros(())
    done = StepEnds(step, expert, step_batch, loss=loss, norm=norm, skipped=job.state.skipped)
    while len(done.batches) < step_batch.accumulation:
        if (stop := job.stop_for_memory()) is not None:
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
        is_last = len(done.batches) + 1 == step_batch.accumulation
        _forward_backward(job, denoiser, outcome, done, following if is_last else None)
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


def _forward_backward(
    job: TrainingJob, denoiser: nn.Module, batch: Batch, done: StepEnds, following: ExpertName | None
) -> None:
    """Add one micro-batch's gradients. `following` replaces this expert after the step; None if none does."""
    model = job.trained_model
    # Both contexts span the backward pass, because checkpointed blocks run forward again in it.
    with model.strength_for(batch, done.expert), model.host.following(following):
        loss = job.step(denoiser, batch, done.expert)
        job.state.scale.scaled(loss.total).backward()
    job.gradients[done.expert].collect()
    done.loss += loss.total.detach()
    done.samples += batch.ref.global_samples
    done.batches.append(batch.ref)
