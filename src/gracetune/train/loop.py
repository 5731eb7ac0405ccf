"""The loop: windows of micro-batches, one optimizer step each, until the run is over or somebody asks it to stop."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gracetune.cache.batches import Batch
from gracetune.data.loader import EpochEnd, Exhausted
from gracetune.data.refs import BatchRef
from gracetune.models.experts import expert_for_window, next_expert
from gracetune.models.spec import ExpertName
from gracetune.optim.ramp import Window
from gracetune.train.control import Stop
from gracetune.train.job import Job


@dataclass(eq=False)
class WindowDone:
    """One window, after its optimizer step. Tensors stay on the device: who reads one waits for it."""

    step: int
    """Windows done, this one included."""
    expert: ExpertName
    window: Window
    loss: Tensor
    """This rank's sum over its samples."""
    norm: Tensor
    samples: int = 0
    """Over all ranks."""
    batches: list[BatchRef] = field(default_factory=list)
    epochs: list[EpochEnd] = field(default_factory=list)
    """Those that ended in this window."""


def fit(job: Job) -> Stop:
    """Until `job.length` windows are done, the data is exhausted, or a stop was asked for. All ranks end together."""
    for callback in job.callbacks:
        callback.start(job)
    while (stop := job.agreed_stop()) is None:
        done = run_window(job)
        if isinstance(done, Stop):
            stop = done
            break
        for callback in job.callbacks:
            callback.window(job, done)
    stop = job.settle() or stop
    job.trainee.host.settle()  # an expert that was on its way to a window that did not begin
    for callback in job.callbacks:
        callback.end(job, stop)
    return stop


def run_window(job: Job) -> WindowDone | Stop:
    """A stop where no batch is left, or memory does not last until the window's end: what was begun leaves no trace."""
    position = job.position
    job.seed_window()
    window = job.ramp.window(position.micro_batches)
    turn = (position.step, job.switch_every, job.trainee.trained)
    expert = expert_for_window(*turn)
    job.on_step_start(expert, window)
    denoiser = job.trainee.host.activate(expert, at_once=False)
    if (coming := next_expert(*turn)) is not None:
        job.trainee.host.prepare(coming)
    gradients = job.gradients[expert]
    gradients.open()
    done = WindowDone(position.step + 1, expert, window, torch.zeros((), device=job.device), torch.zeros(()))
    while len(done.batches) < window.accumulation:
        if (stop := job.cannot_go_on()) is not None:
            gradients.close()
            return stop
        outcome = job.next_batch(window.micro_batch)
        if isinstance(outcome, Exhausted):
            break
        if isinstance(outcome, EpochEnd):
            job.on_epoch_end(outcome)
            done.epochs.append(outcome)
            continue
        _learn(job, denoiser, outcome, done, coming if len(done.batches) + 1 == window.accumulation else None)
    if not done.batches:
        gradients.close()
        return Stop("finished", "the data is exhausted")
    done.norm = gradients.finish(job.scale.factor / done.samples, job.clip)
    job.take_step(done.norm)
    gradients.close()
    job.advance(len(done.batches), done.samples)
    return done


def _learn(job: Job, denoiser: torch.nn.Module, batch: Batch, done: WindowDone, coming: ExpertName | None) -> None:
    with job.trainee.strength_for(batch, done.expert), job.trainee.host.following(coming):  # backward may repeat blocks
        loss = job.step(denoiser, batch, done.expert)
        job.scale.scaled(loss.total).backward()
    job.gradients[done.expert].collect()
    done.loss += loss.total.detach()
    done.samples += batch.ref.global_samples
    done.batches.append(batch.ref)
