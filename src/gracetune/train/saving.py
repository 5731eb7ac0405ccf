"""Checkpoints and, with each of them, the weights as files one can load: on time, and whenever a run ends."""

from __future__ import annotations

import re
from pathlib import Path

from gracetune.checkpoint.manifest import Metadata
from gracetune.checkpoint.random_state import RandomState
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import CheckpointWritten
from gracetune.telemetry.hub import Telemetry
from gracetune.train.control import Stop
from gracetune.train.job import Job
from gracetune.train.loop import WindowDone
from gracetune.train.output import RunFolder, WrongFileError, save_weights
from gracetune.train.pieces import shared_pieces
from gracetune.train.view import View
from gracetune.units import format_bytes

_FOLDER = re.compile(r"checkpoint-(\d+)")


class Saving:
    def __init__(
        self, job: Job, config: RunConfig, folder: RunFolder, store: CheckpointStore, metadata: Metadata,
        telemetry: Telemetry, view: View,
    ) -> None:  # fmt: skip
        self._config, self._folder, self._store, self._metadata = config, folder, store, metadata
        self._telemetry, self._view = telemetry, view
        self._pieces = shared_pieces(job, config)
        self._random = RandomState(job.device)
        self._stages = job.trainee.trained
        self._last = job.position.step
        """A run that has just begun or been resumed has nothing new to save."""
        self._wrong_file: str | None = None

    def start(self, job: Job) -> None: ...

    def window(self, job: Job, done: WindowDone) -> None:
        asked = self._config.checkpoints
        due = asked.every_steps is not None and done.step % asked.every_steps == 0
        if asked.every_epochs is not None:
            due = due or any((ended.epoch + 1) % asked.every_epochs == 0 for ended in done.epochs)
        if due and job.settle() is None:  # a run that has failed is saved at its end
            self._save(job)
        self._tell()

    def end(self, job: Job, stop: Stop) -> None:
        """Always: a run that stopped can be gone on with, and a finished one made longer."""
        self._save(job, weights=stop.kind != "finished")
        self._store.wait()
        self._tell()
        if self._wrong_file is not None and stop.kind != "failed":  # found when the run was over already
            raise WrongFileError(self._wrong_file)

    def _save(self, job: Job, *, weights: bool = True) -> None:
        step = job.position.step
        if step == self._last:
            return
        with job.pausing():
            if weights:
                with job.as_delivered():
                    files = save_weights(
                        job.trainee, self._config, self._folder, step, final=False, write=job.runtime.is_main
                    )
                    self._wrong_file = job.check_saved(files) or self._wrong_file
            self._store.write(step, self._pieces, metadata=self._metadata, per_rank=[self._random])
        if self._wrong_file is not None:
            job.control.ask_to_stop("failed", self._wrong_file)
        self._last = step

    def _tell(self) -> None:
        for written in self._store.finished():
            took = f"{format_bytes(written.size)}, the run waited {written.snapshot_ms:.0f} ms"
            self._view.say(f"checkpoint at step {written.step}: {took}")
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
                    self._folder.remove_step(self._stages, int(match[1]))
