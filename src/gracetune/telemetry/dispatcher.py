"""The hub: hands every event to every sink. Observation never steers: a sink that fails is told once and dropped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from gracetune.redaction import Redactor
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Event, Record, ValidationDone, Warned, step_of


class Sink(Protocol):
    @property
    def name(self) -> str: ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    project: str
    """What `logging.project` says."""
    folder: Path
    """The run's. Paths in events are relative to it."""
    logs: Path
    """Where files of a tracker go, below the run's folder."""


@dataclass(frozen=True)
class Tracker:
    """A sink that a config can ask for by name (`logging.trackers`)."""

    open: Callable[[TrackedRun], Sink]
    check: Callable[[], object] = lambda: None
    """Raises `TelemetryError` where it cannot work here: asked before anything is loaded."""


class Telemetry:
    """`emit` may be called from any thread and never raises what a sink raised.

    `warn` may be called from anywhere, also inside a sink's own write or in a signal handler: it takes no lock. Its
    event is written with the next one, or by `close`. Whoever knows the step emits a `Warned` itself, in place of
    one of the same words that waits.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        *,
        report: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
        redactor: Redactor | None = None,
    ) -> None:
        """`report` gets the one sentence about a sink that failed: for the terminal. `redactor` knows the run's
        secrets: no event and no sentence has one in it."""
        self._sinks = [*sinks]
        self._redactor = redactor or Redactor()
        self._report, self._clock = report, clock
        self._lock = threading.RLock()  # telling of a failed sink is itself an event
        self._waiting: deque[str] = deque()
        self._about_sinks: set[str] = set()
        self._step: int | None = None

    def add(self, sink: Sink) -> None:
        """From the next event on."""
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Warned) and event.message in self._waiting:
                self._waiting.remove(event.message)
            self._write_warnings()
            self._write(event)
            self._write_warnings()

    def warn(self, text: str) -> None:
        if text not in self._about_sinks:  # our own, on its way back from `report`
            self._waiting.append(text)

    def _write_warnings(self) -> None:
        for _ in range(len(self._waiting)):  # a sink that warns of every event gets no chance to go on for ever
            self._write(Warned(message=self._waiting.popleft(), step=self._step))

    def _write(self, event: Event) -> None:
        found = step_of(event)
        self._step = self._step if found is None else found
        record = Record(self._clock(), _without_secrets(event, self._redactor))
        for sink in [*self._sinks]:
            if sink in self._sinks:  # not dropped meanwhile
                self._try(sink, lambda sink=sink: sink.write(record))  # type: ignore[misc]

    def close(self) -> None:
        with self._lock:
            self._write_warnings()
            for sink in [*self._sinks]:
                self._try(sink, sink.close)
            self._sinks = []

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self._sinks.remove(sink)
            text = self._redactor.redact(f"{sink.name} failed and is left out from here on: {_why(error)}")
            self._about_sinks.add(text)
            self._report(text)
            self._write(Warned(message=text, step=self._step))

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_MADE_BY_US = ("path", "sheet")
"""Names of files that sinks open."""


def _without_secrets(event: Event, redactor: Redactor) -> Event:
    shown: dict[str, Any] = {}
    for one in fields(event):
        value = vars(event)[one.name]
        if isinstance(event, ValidationDone) and one.name == "files":
            shown[one.name] = tuple(replace(file, prompt=redactor.redact(file.prompt)) for file in event.files)
        elif one.name not in _MADE_BY_US and isinstance(value, str | Mapping | tuple):
            shown[one.name] = redactor.redact_values(value)
    return replace(event, **shown)


def _why(error: Exception) -> str:
    """On one line."""
    if isinstance(error, TelemetryError):
        return f"{error.found}; {error.hint}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
