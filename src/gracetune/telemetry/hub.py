"""The hub: hands every event to every sink. Observation never steers: a sink that fails is told once and dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Event, Record, Warned


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
    """`emit` may be called from any thread and never raises what a sink raised."""

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        *,
        report: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`report` gets the one sentence about a sink that failed: for the terminal."""
        self._sinks = [*sinks]
        self._report, self._clock = report, clock
        self._lock = threading.RLock()  # telling of a failed sink is itself an event

    def add(self, sink: Sink) -> None:
        """From the next event on."""
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        with self._lock:
            record = Record(self._clock(), event)
            for sink in [*self._sinks]:
                if sink in self._sinks:  # not dropped meanwhile
                    self._try(sink, lambda sink=sink: sink.write(record))  # type: ignore[misc]

    def close(self) -> None:
        with self._lock:
            for sink in [*self._sinks]:
                self._try(sink, sink.close)
            self._sinks = []

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self._sinks.remove(sink)
            text = f"{sink.name} failed and is left out from here on: {_why(error)}"
            self._report(text)
            self.emit(Warned(message=text))

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _why(error: Exception) -> str:
    """On one line."""
    if isinstance(error, TelemetryError):
        return f"{error.found}; {error.hint}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
