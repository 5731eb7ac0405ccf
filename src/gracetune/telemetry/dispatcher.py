"""Distribution of events to sinks. Observation never steers: a sink that fails is reported once and removed."""

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
    """The value of `logging.project`."""
    folder: Path
    """The run's folder. Paths in events are relative to it."""
    logs: Path
    """Folder for files of trackers, below the run's folder."""


@dataclass(frozen=True)
class Tracker:
    """A sink that a config selects by name (`logging.trackers`)."""

    open: Callable[[TrackedRun], Sink]
    check: Callable[[], object] = lambda: None
    """Raises `TelemetryError` if the sink cannot work on this machine. Called before anything is loaded."""


class Telemetry:
    """Writes each event to every sink.

    `emit` may be called from any thread. It never raises what a sink raised.

    `warn` may be called from anywhere, even from a sink's own `write` or from a signal handler: it takes no lock. The
    `Warned` event is queued and written with the next event, or by `close`. A caller that knows the step emits the
    `Warned` event itself; that event replaces a queued one with the same message.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        *,
        report: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
        redactor: Redactor | None = None,
    ) -> None:
        """`report` prints the message about a sink that failed. `redactor` removes the run's secrets from every event
        and message."""
        self._sinks = [*sinks]
        self._redactor = redactor or Redactor()
        self._report, self._clock = report, clock
        self._lock = threading.RLock()  # reentrant: a failed sink is reported by an event while `_write` holds it
        self._queued: deque[str] = deque()
        self._sink_failures: set[str] = set()
        self._step: int | None = None

    def add(self, sink: Sink) -> None:
        """Add a sink. It receives the events emitted from now on."""
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Warned) and event.message in self._queued:
                self._queued.remove(event.message)
            self._write_warnings()
            self._write(event)
            self._write_warnings()

    def warn(self, text: str) -> None:
        if text not in self._sink_failures:  # `report` may call `warn`; the failure already has its event
            self._queued.append(text)

    def _write_warnings(self) -> None:
        # Only those queued now: a sink that warns on every event would otherwise keep this loop running for ever.
        for _ in range(len(self._queued)):
            self._write(Warned(message=self._queued.popleft(), step=self._step))

    def _write(self, event: Event) -> None:
        found = step_of(event)
        self._step = self._step if found is None else found
        record = Record(self._clock(), _without_secrets(event, self._redactor))
        for sink in [*self._sinks]:
            if sink in self._sinks:  # an earlier sink's failure emits an event, which may have removed this one
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
        except Exception as error:  # noqa: BLE001 - training continues, whatever a tracker raises
            self._sinks.remove(sink)
            text = self._redactor.redact(f"{sink.name} failed and is left out from here on: {_why(error)}")
            self._sink_failures.add(text)
            self._report(text)
            self._write(Warned(message=text, step=self._step))

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_FILE_FIELDS = ("path", "sheet")
"""Fields with paths that sinks open. They are not redacted: a changed path would name no file."""


def _without_secrets(event: Event, redactor: Redactor) -> Event:
    shown: dict[str, Any] = {}
    for one in fields(event):
        value = vars(event)[one.name]
        if isinstance(event, ValidationDone) and one.name == "files":
            shown[one.name] = tuple(replace(file, prompt=redactor.redact(file.prompt)) for file in event.files)
        elif one.name not in _FILE_FIELDS and isinstance(value, str | Mapping | tuple):
            shown[one.name] = redactor.redact_values(value)
    return replace(event, **shown)


def _why(error: Exception) -> str:
    """The error as a single line."""
    if isinstance(error, TelemetryError):
        return f"{error.found}; {error.hint}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
