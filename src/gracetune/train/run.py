"""Train one config: preflight, load, fit, finish. Each step is a module of this folder.

result = train(config, environment=environment, options=RunOptions(), view=View())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.errors import Problem
from gracetune.memory.reclaim import rare_collections
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.storage.os_errors import explained
from gracetune.train.callbacks import callbacks_of
from gracetune.train.control import Control, Stop, listening
from gracetune.train.finish import finish, remove_recorded_entries, report_failure
from gracetune.train.first_batch import FirstBatch, memory_explained
from gracetune.train.load import load
from gracetune.train.logs import open_telemetry
from gracetune.train.loop import fit
from gracetune.train.output import RunFolder
from gracetune.train.planning import PlannedRun
from gracetune.train.preflight import preflight
from gracetune.train.publishing import Publishing
from gracetune.train.run_options import RunOptions
from gracetune.train.view import View

__all__ = ["Result", "RunOptions", "train"]

LONGER = "nothing was left to do; a larger training.max_steps (--max-steps N) makes the run longer"


@dataclass(frozen=True)
class Result:
    """The outcome of `train`."""

    stop: Stop | None
    """Why the run ended; None after a dry run."""
    step: int
    """Optimizer steps done."""
    steps: int
    """Length of the whole run in optimizer steps."""
    files: tuple[Path, ...]
    """The final weights; empty if the run stopped early."""
    planned: PlannedRun
    first_batch: FirstBatch | None
    """None if nothing was left to do."""
    hours: float
    """Estimated length of the run when it began, from the time of the first batch."""
    notes: tuple[str, ...] = ()

    @property
    def seconds_per_step(self) -> float:
        return 3600 * self.hours / max(1, self.steps - self.step)


def train(
    config: RunConfig, *, environment: Environment, options: RunOptions, view: View, control: Control | None = None,
    on_memory: Callable[[UnifiedMemory], None] = lambda memory: None, known: Sequence[tuple[str, Problem]] = (),
) -> Result:  # fmt: skip
    """Run `config` to its end and return the result.

    `control` must already listen to signals; if it is None, the run installs its own handlers. `on_memory` is called
    with the unified-memory layer once that is open. `known` is passed to `preflight`.
    """
    folder = RunFolder.of(config).path
    # Operating-system errors that no inner part explains are explained here.
    with explained("this run", folder, elsewhere="--set output_dir=FOLDER"), ExitStack() as stack:
        if control is None:
            control = stack.enter_context(listening(Control(stops_on_sigusr1=environment.stops_on_sigusr1)))
        control.report = view.report
        # Imports of diffusers and transformers create many objects; collecting them is slow.
        with rare_collections(), view.waiting("checking the config, the model's files and the machine"):
            ready = preflight(config, environment=environment, options=options, view=view, stack=stack, known=known)
        if ready.files:
            if ready.runtime.is_main and not options.dry_run:
                remove_recorded_entries(config, view)
            step = ready.start.step
            return Result(Stop("finished", LONGER), step, step, ready.files, ready.planned, None, 0.0)
        with view.waiting("preparing the run"):
            loaded = load(ready, control, view, stack, on_memory=on_memory)
        job, first_batch = loaded.job, loaded.first_batch
        stop: Stop | None = None
        files: tuple[Path, ...] = ()
        if not options.dry_run:
            telemetry = stack.enter_context(
                open_telemetry(config, ready.folder, view, environment, main=ready.runtime.is_main)
            )
            publishing = Publishing(config, ready.folder, environment, view, main=ready.runtime.is_main)
            publishing.begin()
            callbacks = callbacks_of(ready, loaded, telemetry, view, publishing)
            stack.enter_context(loaded.watchdog)
            began = time.monotonic()
            control.phase = "training"
            failure_report = report_failure(ready, job, telemetry, view, began=began)
            with failure_report, memory_explained(job, ready.planned), view.waiting("training"):
                stop = fit(job, callbacks.every)
            control.phase = "finishing"
            with view.waiting("writing and checking the files of the run"):
                files = finish(
                    ready, loaded, stop, telemetry, view, began=began, check_saved=callbacks.check_saved
                )  # fmt: skip
                publishing.result(job.position.step, files)
                publishing.end()
        return Result(
            stop, job.position.step, job.length.steps, files, ready.planned, first_batch, loaded.hours, loaded.notes
        )  # fmt: skip
