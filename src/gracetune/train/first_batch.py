"""Run one real batch through every trained expert before training, so that a job that does not fit fails at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gracetune.cache.batches import Batch
from gracetune.errors import GracetuneError, Problem
from gracetune.models.spec import ExpertName
from gracetune.train.control import Stop
from gracetune.train.job import TrainingJob
from gracetune.train.planning import PlannedRun
from gracetune.train.step import TrainStep
from gracetune.train.trained_model import TrainedModel
from gracetune.units import format_bytes


class FirstBatchError(GracetuneError):
    """The first batch failed."""


@dataclass(frozen=True)
class FirstBatch:
    samples: int
    """Samples of this rank in the batch."""
    first_seconds: float
    """Time of the slowest expert's first pass, including work that is done once: compiling, choosing kernels."""
    seconds: float
    """Time of one micro-batch in the second pass, of the slowest expert."""
    peak_bytes: int | None
    """Peak of torch's allocated memory; None without a GPU."""

    @property
    def once_ms(self) -> float:
        """Time of the work that is done once, in milliseconds."""
        return 1000 * max(0.0, self.first_seconds - self.seconds)


class ReferenceBatch:
    """The first batch, and each expert's prediction for it before the first step. Kept until the self-check is done.

    Two passes with equal weights use the same noise, levels and dropout. If their predictions differ, the cause is
    kernels that are not deterministic.
    """

    def __init__(self, batch: Batch) -> None:
        """Copy the batch, because the source reuses its memory."""
        self._batch: Batch | None = Batch(batch.ref, {name: _copied(one) for name, one in batch.tensors.items()})
        self._before: dict[ExpertName, tuple[Tensor, Tensor]] = {}

    def predict(self, step: TrainStep, trained_model: TrainedModel, denoiser: nn.Module, expert: ExpertName) -> Tensor:
        """The current prediction for the batch."""
        assert self._batch is not None, "called before `release`"
        with trained_model.strength_for(self._batch, expert), _repeatable(self._batch):
            return step.predict(denoiser, self._batch, expert)

    def keep(self, expert: ExpertName, one: Tensor, again: Tensor) -> None:
        """Keep two predictions made before the first step."""
        self._before[expert] = one, (one.float() - again.float()).square().sum()

    def before(self, expert: ExpertName) -> tuple[Tensor, Tensor]:
        """The prediction before the first step, and the sum of squared differences between two such predictions."""
        return self._before[expert]

    def release(self) -> None:
        self._batch = None
        self._before.clear()


def try_first_batch(job: TrainingJob, size: int, planned: PlannedRun) -> tuple[FirstBatch, ReferenceBatch]:
    """Run forward and backward at the largest micro-batch.

    Nothing is trained, and the positions of loader and random generators are restored.
    """
    before = job.state.loader.state_dict()
    devices = [job.device] if job.device.type == "cuda" else []
    if devices:
        torch.cuda.reset_peak_memory_stats(job.device)
    try:
        with torch.random.fork_rng(devices=devices):
            batch = _batch(job, size)
            example = ReferenceBatch(batch)
            times = {expert: _twice(job, batch, expert, example) for expert in job.trained_model.trained}
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
    return FirstBatch(len(batch.ref.samples), first, second, peak), example


def hours_left(job: TrainingJob, first_batch: FirstBatch, batch_size: int) -> float:
    """Estimated time of the remaining steps. Time is proportional to samples, so a ramp's small batches count less."""
    samples = job.ramp.samples(job.position.micro_batches, job.length.steps - job.position.step)
    return samples / batch_size * first_batch.seconds / 3600


@contextmanager
def memory_explained(job: TrainingJob, planned: PlannedRun) -> Iterator[None]:
    """Explain running out of memory during training: a later batch may be larger than the first."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = job.ramp.step_batch(job.position.micro_batches).micro_batch
        raise _out_of_memory(job, size, planned, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch has an exception type for GPU memory. For host memory only the message names the allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _batch(job: TrainingJob, size: int) -> Batch:
    while not isinstance(outcome := job.next_batch(size), Batch):
        if isinstance(outcome, Stop):
            raise FirstBatchError(outcome.reason)
    return outcome


def _twice(job: TrainingJob, batch: Batch, expert: ExpertName, example: ReferenceBatch) -> tuple[float, float]:
    """Run two passes, keep their predictions, and return the time of each.

    The adapter of a new run changes nothing yet, so the predictions are then the base model's.
    """
    (one, first_seconds), (again, second_seconds) = _once(job, batch, expert), _once(job, batch, expert)
    example.keep(expert, one, again)
    return first_seconds, second_seconds


def _once(job: TrainingJob, batch: Batch, expert: ExpertName) -> tuple[Tensor, float]:
    """Run forward and backward. Returns the prediction and the seconds."""
    began = time.perf_counter()
    denoiser = job.trained_model.host.activate(expert)
    job.gradients[expert].open()
    with job.trained_model.strength_for(batch, expert), _repeatable(batch):
        loss = job.step(denoiser, batch, expert)
        loss.total.backward()
    if not bool(loss.total.isfinite()):  # synchronizes, which training steps never do
        names = ", ".join(sample.path for sample in batch.ref.samples)
        found = f"the loss of the very first batch is {loss.total.item()} ({names})"
        hint = (
            "--set model.base_precision=bf16 or fp32, --set training.mixed_precision=bf16; look at that batch's files"
        )
        raise FirstBatchError(str(Problem("first batch", found, "a number", hint)))
    return loss.prediction.clone(), time.perf_counter() - began


@contextmanager
def _repeatable(batch: Batch) -> Iterator[None]:
    """Inside, random values in layers (dropout) are the same every time. The generators are restored afterwards."""
    device = batch.tensors["latents"].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which is a view if `tensor` is one: compiled blocks have guards on both."""
    if not tensor._is_view() or not tensor.numel():
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _out_of_memory(job: TrainingJob, size: int, planned: PlannedRun, error: BaseException) -> FirstBatchError:
    held = ""
    if job.device.type == "cuda":
        held = f", {format_bytes(torch.cuda.max_memory_allocated(job.device))} held at the peak"
    edits = [] if planned.mismatch else [change for change in planned.plan.changes if not change.automatic]
    proposed = " ".join(f"--set '{change.key}={change.after}'" for change in edits) or (
        "--set training.gradient_checkpointing=full, or a smaller training.batch_size (with more "
        "training.gradient_accumulation_steps), a smaller resolution or fewer frames"
    )
    plan = planned.mismatch or f"{planned.plan.verdict}, {planned.plan.summary}"
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    problem = Problem(
        key=f"out of memory after {job.position.step} steps, at a micro-batch of {size}",
        found=f"{first_line}{held}; the plan says: {plan}",
        expected="room for one micro-batch, forward and backward",
        hint=f"{proposed}; then the same command again: it resumes from the last checkpoint",
    )
    return FirstBatchError(str(problem))
