"""What a run shows while it works. The command line draws it; without one nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gracetune.cache.pass_worker import PassProgress
from gracetune.data.staging.progress import OnProgress, unwatched
from gracetune.storage.transfer import OnFetched
from gracetune.telemetry.progress import RunStatus

if TYPE_CHECKING:
    from gracetune.hardware import Machine
    from gracetune.train.planning import PlannedRun


class View:
    """Does nothing: a subclass shows what it likes. Observation never steers."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        """Everything that was warned of."""
        self._recorder: Callable[[str], None] | None = None

    def report(self, text: str) -> None:
        """One line the user should read."""

    def warn(self, text: str) -> None:
        """Something asked for is not done, or done otherwise. Who shows it calls this too."""
        self.record(text)

    def record(self, text: str) -> None:
        """A warning for the log of the run, not shown. May be called from anywhere: see `Telemetry.warn`."""
        self.warnings.append(text)
        if self._recorder is not None:
            self._recorder(text)

    def record_with(self, recorder: Callable[[str], None]) -> None:
        """`recorder` gets every warning, those until now and those to come."""
        self._recorder = recorder
        for text in self.warnings:
            recorder(text)

    def planned(self, planned: PlannedRun, machine: Machine) -> None:
        """The memory plan, before anything is loaded."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def on_scanned(self, name: str, done: int, total: int) -> None: ...

    def on_download(self, name: str) -> OnFetched:
        """Of a dataset or a model: told how many bytes are here, of how many."""
        return lambda done, total: None

    def on_staging(self, name: str) -> OnProgress:
        return unwatched

    def on_text(self, progress: PassProgress) -> None: ...

    def on_latents(self, progress: PassProgress) -> None: ...

    def on_step(self, step: int, steps: int) -> None: ...

    def on_status(self, status: RunStatus) -> None:
        """At every log step: loss, pace, memory."""


class CollectingView(View):
    """Shows nothing, and keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)
