"""A thread that looks at memory once a second, because a video step lasts longer than memory does.

When main memory or the device falls under its floor it asks the training loop to save and stop at the next micro-batch.
It never ends anything itself. On a machine with one pool of memory, running out hangs the box; this is what comes
before.

A request stays, even if memory recovers before the loop looks: a run that dipped under the floor once will do so again,
perhaps further.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.sensors import Vitals
from gracetune.units import format_bytes

# A file system that went away, a CUDA call that failed, text that is no number: a sensor's troubles, not ours.
_SENSOR_ERRORS = (OSError, RuntimeError, ValueError)
_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class Floors:
    """Under these the run is asked to stop; None: not watched.

    A full device is the ordinary state of a run that overflows, so most runs leave `device` unset.
    """

    host: int | None
    device: int | None = None

    def breach(self, vitals: Vitals) -> str | None:
        watched = (
            ("main memory", vitals.host_headroom, self.host),
            ("device memory", vitals.device_available, self.device),
        )
        return (
            "; ".join(
                f"{format_bytes(left)} of {name} left, the floor is {format_bytes(floor)}"
                for name, left, floor in watched
                if left is not None and floor is not None and left < floor
            )
            or None
        )

    def trouble(self, vitals: Vitals) -> str | None:
        """What is watched and could not be read."""
        blind = []
        if self.host is not None and vitals.host_headroom is None:
            blind.append("main memory is unknown")
        if self.device is not None and vitals.device_available is None:
            blind.append("device memory is unknown")
        return "; ".join((*blind, *vitals.notes)) if blind else None


@dataclass(frozen=True)
class StopRequest:
    """Save and stop at the next micro-batch."""

    reason: str
    reading: Vitals
    at: float
    """On the watchdog's clock."""


@dataclass(frozen=True)
class WatchdogEvent:
    kind: Literal["sensor failed", "sensor works again", "stop requested"]
    text: str
    at: float


class Watchdog:
    """Use it as a context manager around the training loop, once.

    `report` is called from the watchdog's thread, once per change and not once per second.
    """

    def __init__(
        self,
        read: Callable[[], Vitals],
        floors: Floors,
        *,
        report: Callable[[WatchdogEvent], None],
        period: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not period > 0:
            raise ValueError(f"the watchdog's period must be more than 0 seconds: {period}")
        self._read = read
        self._floors = floors
        self._report = report
        self._period = period
        self._clock = clock
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gracetune-memory-watchdog", daemon=True)
        self._trouble: str | None = None
        self._request: StopRequest | None = None
        self._died: BaseException | None = None
        self.samples = 0
        """How often it has looked."""

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        # A sensor may hang in a driver that hangs. The thread is a daemon: it cannot keep the process alive.
        self._thread.join(_JOIN_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def requested(self) -> StopRequest | None:
        """What the training loop asks at every micro-batch; free of locks and system calls."""
        if self._died is not None:
            raise UnifiedMemoryError(f"the memory watchdog has stopped watching: {self._died!r}") from self._died
        return self._request

    def _run(self) -> None:
        try:
            self._look()
            while not self._leave.wait(self._period):
                self._look()
        except BaseException as error:
            self._died = error  # the loop hears of it at the next micro-batch
            raise

    def _look(self) -> None:
        try:
            vitals = self._read()
        except _SENSOR_ERRORS as error:
            self._note_trouble(f"{type(error).__name__}: {error}")
        else:
            self._note_trouble(self._floors.trouble(vitals))
            self._judge(vitals)
        self.samples += 1

    def _judge(self, vitals: Vitals) -> None:
        reason = self._floors.breach(vitals)
        if reason is None or self._request is not None:
            return
        self._request = StopRequest(reason, vitals, self._clock())
        self._report(WatchdogEvent("stop requested", reason, self._request.at))

    def _note_trouble(self, text: str | None) -> None:
        if text == self._trouble:
            return
        previous, self._trouble = self._trouble, text
        if text is not None:
            self._report(WatchdogEvent("sensor failed", text, self._clock()))
        elif previous is not None:
            self._report(WatchdogEvent("sensor works again", f"before: {previous}", self._clock()))
