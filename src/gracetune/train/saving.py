"""Save checkpoints, each with weights that other programs can load: periodically, on request, and when a run ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from gracetune.checkpoint.manifest import Metadata
from gracetune.checkpoint.state_parts import RandomState
from gracetune.checkpoint.store import CheckpointStore
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.events import CheckpointWritten
from gracetune.train.control import Control, Stop
from gracetune.train.hooks import Callback, RunEnds, StepEnds
from gracetune.train.job import Pauses
from gracetune.train.output import RunFolder, WrongFileError, save_weights
from gracetune.train.requested import TakenRequests
from gracetune.train.runtime import Runtime
from gracetune.train.state_parts import CheckpointSource, shared_parts
from gracetune.train.view import View
from gracetune.units import format_bytes

_FOLDER = re.compile(r"checkpoint-(\d+)")


class Saving(Callback):
    def __init__(
        self, saved: CheckpointSource, folder: RunFolder, store: CheckpointStore, metadata: Metadata, runtime: Runtime,
        control: Control, pauses: Pauses, telemetry: Telemetry, view: View, *,
        failure: Callable[[], Stop | None], check_saved: Callable[[Sequence[Path]], str | None],
        samples_follow: Callable[[StepEnds], bool], requested: TakenRequests,
        on_saved: Callable[[int, Sequence[Path]], None],
    ) -> None:  # fmt: skip
        """`failure` waits until all steps are checked for non-finite gradients, and returns a `Stop` if the run failed.

        `check_saved` gets the files just saved, one for each trained expert, inside `as_delivered`. It returns why one
        of them is wrong, or None. `samples_follow`: whether validation runs after this step. `on_saved` gets the
        correct files of each step.
        """
        self._saved, self._folder, self._store, self._metadata = saved, folder, store, metadata
        self._runtime, self._control, self._pauses = runtime, control, pauses
        self._telemetry, self._view = telemetry, view
        self._failure, self._check_saved = failure, check_saved
        self._samples_follow, self._requested, self._on_saved = samples_follow, requested, on_saved
        self._parts = shared_parts(saved)
        self._random = RandomState(runtime.device)
        self._experts = [one for one in saved.trained_model.facts.experts if one.name in saved.trained_model.trained]
        self._last = saved.state.position.step
        """The step of the last checkpoint. A run that has just started or resumed has nothing new to save."""
        self._wrong_file: str | None = None

    def step_ends(self, done: StepEnds) -> None:
        requested = self._saved.config.checkpoints
        due = requested.every_steps is not None and done.step % requested.every_steps == 0
        if requested.every_epochs is not None:
            due = due or any((ended.epoch + 1) % requested.every_epochs == 0 for ended in done.epochs)
        due = due or self._requested.includes("save")
        if due and self._failure() is None:  # a failed run is saved at its end, at the step before the failure
            if self._samples_follow(done):
                self._store.begin_work("sampling", done.step)
            self._save()
        self._report()

    def end(self, ended: RunEnds) -> None:
        """Save in any case: a stopped run can be resumed, and a finished one can be extended."""
        self._save(weights=ended.stop.kind != "finished")
        self._store.wait()
        self._report()
        if self._wrong_file is not None and ended.stop.kind != "failed":  # found after the loop had ended
            raise WrongFileError(self._wrong_file)

    def _save(self, *, weights: bool = True) -> None:
        """Save a checkpoint and, if `weights`, files for other programs. `finish` writes those of a finished run."""
        saved = self._saved
        step = saved.state.position.step
        if step == self._last:
            return
        files: list[Path] = []
        self._store.begin_work("saving", step)
        with self._pauses.counted():
            if weights:
                with saved.state.as_delivered():
                    files = save_weights(
                        saved.trained_model, saved.config, self._folder, step, final=False, write=self._runtime.is_main
                    )
                    self._wrong_file = self._check_saved(files) or self._wrong_file
            self._store.write(step, self._parts, metadata=self._metadata, per_rank=[self._random])
        if self._wrong_file is not None:
            self._control.ask_to_stop("failed", self._wrong_file)
        elif files:
            self._on_saved(step, files)
        self._last = step

    def _report(self) -> None:
        for written in self._store.finished():
            took = f"{format_bytes(written.size)}, the run waited {written.snapshot_ms:.0f} ms"
            self._view.report(f"checkpoint at step {written.step}: {took}")
            self._telemetry.emit(
                CheckpointWritten(
                    step=written.step,
                    path=str(written.path.relative_to(self._folder.path)),
                    size_bytes=written.size,
                    snapshot_ms=written.snapshot_ms,
                    write_ms=written.write_ms,
                    removed=written.removed,
                )
            )
            for note in written.notes:
                self._view.warn(note)
            for name in written.removed:
                match = _FOLDER.fullmatch(Path(name).name)
                if match:
                    self._remove_weights(int(match[1]))

    def _remove_weights(self, step: int) -> None:
        """Remove the weights of a checkpoint that was deleted."""
        notes = self._folder.remove_step(self._experts, step)
        for note in notes:
            self._view.warn(note)
        if not notes:
            self._store.end_work("retiring", step)
