"""Time the self-check of a run (`train/self_check.py`) on the model that was just measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from gracetune.bench.step.clock import synchronize
from gracetune.bench.step.trainer import Trainer
from gracetune.cache.batches import Batch
from gracetune.config.run_config import RunConfig
from gracetune.data.loader import EpochEnd
from gracetune.errors import GracetuneError
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.train.control import Stop
from gracetune.train.first_batch import ReferenceBatch
from gracetune.train.hooks import RunStarts
from gracetune.train.loop import run_step
from gracetune.train.output import RunFolder, save_weights
from gracetune.train.self_check import STEPS, SelfCheck
from gracetune.train.view import CollectingView

T = TypeVar("T")


def time_self_check(trainer: Trainer, config: RunConfig) -> tuple[float, float]:
    """Seconds of its two parts: the check of the adapter in the first steps, and of its first file.

    Writing the file does not count, since every run does that anyway.
    """
    job, folder, view = trainer.job, RunFolder.of(config), CollectingView()
    while isinstance(batch := job.next_batch(1), EpochEnd):
        continue
    if not isinstance(batch, Batch):
        raise GracetuneError("the data of the measurement is exhausted")
    example = ReferenceBatch(batch)
    for expert in job.trained_model.trained:  # a run has these from its first batch
        denoiser = job.trained_model.host.activate(expert)
        example.keep(expert, *(example.predict(job.step, job.trained_model, denoiser, expert) for _ in range(2)))
    check = SelfCheck(
        config, folder, job.evaluated, example, job.control, job.pauses, Telemetry(), view, steps=job.length.steps
    )
    check.start(RunStarts(replace(job.position), job.length.steps))

    def timed(part: Callable[[], T]) -> tuple[T, float]:
        synchronize(job.device)
        began = time.perf_counter()
        result = part()
        synchronize(job.device)
        return result, time.perf_counter() - began

    of_adapter = 0.0

    for _ in range(STEPS):
        done = run_step(job)
        if isinstance(done, Stop):
            raise GracetuneError(f"the run ended in the middle of the measurement: {done.reason}")
        of_adapter += timed(partial(check.step_ends, done))[1]
    folder.make_private()
    files = save_weights(job.trained_model, config, folder, job.position.step, final=False, write=True)
    wrong, of_file = timed(partial(check.check_saved, files))
    failed = job.control.stop.reason if job.control.stop is not None else wrong
    if failed:
        raise GracetuneError(f"the self-check of the measured model failed: {failed}")
    return of_adapter, of_file
