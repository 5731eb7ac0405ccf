"""One real batch through every trained expert before the run begins: what does not fit shows in the first minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from gracetune.cache.batches import Batch
from gracetune.errors import GracetuneError, Problem
from gracetune.models.spec import ExpertName
from gracetune.train.control import Stop
from gracetune.train.job import Job
from gracetune.train.planning import Planned
from gracetune.units import format_bytes


class DryBatchError(GracetuneError):
    """The first batch does not go through."""


@dataclass(frozen=True)
class DryBatch:
    samples: int
    first_seconds: float
    """With whatever happens only once: compiling, choosing kernels."""
    seconds: float
    """Of one micro-batch, the slowest expert's."""
    peak_bytes: int | None
    """torch's own counter; None without a GPU."""

    @property
    def once_ms(self) -> float:
        """What happens only once, in milliseconds."""
        return 1000 * max(0.0, self.first_seconds - self.seconds)


class Example:
    """One sample of the first batch, kept for checks until they are done with it."""

    def __init__(self, batch: Batch) -> None:
        """Its first sample, in memory of its own: the source reuses a batch's."""
        ref = replace(batch.ref, samples=batch.ref.samples[:1], indexes=batch.ref.indexes[:1], global_samples=1)
        self._kept = [Batch(ref, {name: tensor[:1].clone() for name, tensor in batch.tensors.items()})]

    @property
    def batch(self) -> Batch:
        return self._kept[0]

    def release(self) -> None:
        self._kept.clear()


def dry_batch(job: Job, size: int, planned: Planned) -> tuple[DryBatch, Example]:
    """Forward and backward at the largest micro-batch. Nothing is learnt, and no position or generator moves."""
    before = job.state.loader.state_dict()
    devices = [job.device] if job.device.type == "cuda" else []
    if devices:
        torch.cuda.reset_peak_memory_stats(job.device)
    try:
        with torch.random.fork_rng(devices=devices):
            batch = _batch(job, size)
            example = Example(batch)
            times = {expert: (_once(job, batch, expert), _once(job, batch, expert)) for expert in job.trainee.trained}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(job, size, planned, error) from error
    finally:
        for gradients in job.gradients.values():
            gradients.close()
        job.state.loader.load_state_dict(before)
    peak = torch.cuda.max_memory_allocated(job.device) if devices else None
    first, second = (max(pair[number] for pair in times.values()) for number in (0, 1))
    return DryBatch(len(batch.ref.samples), first, second, peak), example


def hours_left(job: Job, dry: DryBatch, batch_size: int) -> float:
    """The windows still to come at this pace; smaller micro-batches of a ramp take their share of the time."""
    samples = job.ramp.samples(job.position.micro_batches, job.length.steps - job.position.step)
    return samples / batch_size * dry.seconds / 3600


@contextmanager
def memory_explained(job: Job, planned: Planned) -> Iterator[None]:
    """A later batch may be larger than the first."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = job.ramp.window(job.position.micro_batches).micro_batch
        raise _out_of_memory(job, size, planned, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type of its own for a GPU; for main memory there is only the allocator's name in the text."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _batch(job: Job, size: int) -> Batch:
    while not isinstance(outcome := job.next_batch(size), Batch):
        if isinstance(outcome, Stop):
            raise DryBatchError(outcome.reason)
    return outcome


def _once(job: Job, batch: Batch, expert: ExpertName) -> float:
    began = time.perf_counter()
    denoiser = job.trainee.host.activate(expert)
    job.gradients[expert].open()
    with job.trainee.strength_for(batch, expert):
        loss = job.step(denoiser, batch, expert)
        loss.total.backward()
    if not bool(loss.total.isfinite()):  # the one place where a loss is waited for
        names = ", ".join(sample.path for sample in batch.ref.samples)
        found = f"the loss of the very first batch is {loss.total.item()} ({names})"
        hint = (
            "--set model.base_precision=bf16 or fp32, --set training.mixed_precision=bf16; look at that batch's files"
        )
        raise DryBatchError(str(Problem("first batch", found, "a number", hint)))
    return time.perf_counter() - began


def _out_of_memory(job: Job, size: int, planned: Planned, error: BaseException) -> DryBatchError:
    held = ""
    if job.device.type == "cuda":
        held = f", {format_bytes(torch.cuda.max_memory_allocated(job.device))} held at the peak"
    edits = [] if planned.not_ours else [change for change in planned.plan.changes if not change.automatic]
    proposed = " ".join(f"--set '{change.key}={change.after}'" for change in edits) or (
        "--set training.gradient_checkpointing=full, or a smaller training.batch_size (with more "
        "training.gradient_accumulation_steps), a smaller resolution or fewer frames"
    )
    plan = planned.not_ours or f"{planned.plan.verdict}, {planned.plan.summary}"
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    problem = Problem(
        key=f"out of memory after {job.position.step} steps, at a micro-batch of {size}",
        found=f"{first_line}{held}; the plan says: {plan}",
        expected="room for one micro-batch, forward and backward",
        hint=f"{proposed}; then the same command again: it goes on from the last checkpoint",
    )
    return DryBatchError(str(problem))
