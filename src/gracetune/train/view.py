"""The interface through which a run shows its progress. The command line implements it; `View` itself shows nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gracetune.cache.pass_worker import PassProgress
from gracetune.data.staging.report import OnProgress, unwatched
from gracetune.storage.transfer import OnFetched
from gracetune.telemetry.progress import RunStatus

if TYPE_CHECKING:
    from gracetune.hardware import Machine
    from gracetune.train.planning import PlannedRun


class View:
    """Shows nothing; subclasses override what they show. A view must not influence the run."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        """All warnings so far."""
        self._recorder: Callable[[str], None] | None = None
        self._recording = threading.RLock()

    def report(self, text: str) -> None:
        """Show one line to the user."""

    def warn(self, text: str) -> None:
        """Warn of a setting without effect, or of something that failed while the run continues.

        A subclass that shows the warning calls this method too.
        """
        self.record(text)

    def record(self, text: str) -> None:
        """Record a warning in the run's log without showing it. May be called from any thread."""
        with self._recording:
            self.warnings.append(text)
            if self._recorder is not None:
                self._recorder(text)

    def record_with(self, recorder: Callable[[str], None]) -> None:
        """Pass every warning to `recorder`, past and future ones."""
        with self._recording:
            self._recorder = recorder
            for text in self.warnings:
                recorder(text)

    def planned(self, planned: PlannedRun, machine: Machine) -> None:
        """Show the memory plan, before anything is loaded."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that a phase of the run begins, then wait as `waiting` does."""
        yield

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show what the run waits for, until something else shows progress."""
        yield

    def on_scanned(self, name: str, done: int, total: int) -> None:
        """Show how many of a dataset's files have been examined."""

    def on_download(self, name: str) -> OnFetched:
        """A callback for the download of a dataset or a model. It gets the bytes received and the total."""
        return lambda done, total: None

    def on_staging(self, name: str) -> OnProgress:
        return unwatched

    def on_text(self, progress: PassProgress) -> None:
        """Show the progress of the encode pass over captions."""

    def on_latents(self, progress: PassProgress) -> None:
        """Show the progress of the encode pass over images, clips and audio."""

    def on_sample(self, step: int, done: int, total: int) -> None:
        """Show how many samples of a validation have been generated."""

    def on_step(self, step: int, steps: int) -> None:
        """Called after every optimizer step. `steps` is the length of the whole run."""

    def on_status(self, status: RunStatus) -> None:
        """Show loss, pace and memory. Called every few seconds and at log steps."""

    def on_summary(self, status: RunStatus) -> None:
        """Print a summary line. Called about every 5 % of the run, and at its end."""


class CollectingView(View):
    """Shows nothing and keeps the reported lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)
