"""A thread that samples memory once per second, because memory may run out in the middle of a long video step.

When main memory or GPU memory falls below its floor, the watchdog requests that the training loop saves and stops at
the next micro-batch. It never ends anything itself. On a machine whose CPU and GPU share one pool of memory, running
out of memory hangs the machine, so the run must stop earlier.

A request is kept even if memory recovers before the loop checks it, because a run that fell below the floor once will
do so again.
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

# Errors of a sensor: an unavailable file system, a failed CUDA call, unparsable text. They are reported, not raised.
_SENSOR_ERRORS = (OSError, RuntimeError, ValueError)
_JOIN_SECONDS = 10.0
"""How long the end of the block waits for the thread."""


@dataclass(frozen=True)
class Floors:
    """The levels below which the run must stop; None means not watched.

    A full GPU is normal for a run that overflows, so most runs leave `device` unset.
    """

    host: int | None
    device: int | None = None

    def breach(self, vitals: Vitals) -> str | None:
        """A description of the floors that are violated, or None."""
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
        """A description of watched values that could not be read, or None."""
        unknown = []
        if self.host is not None and vitals.host_headroom is None:
            unknown.append("main memory is unknown")
        if self.device is not None and vitals.device_available is None:
            unknown.append("device memory is unknown")
        return "; ".join((*unknown, *vitals.notes)) if unknown else None


@dataclass(frozen=True)
class StopRequest:
    """A request to save and stop at the next micro-batch."""

    reason: str
    reading: Vitals
    at: float
    """Time on the watchdog's clock."""


@dataclass(frozen=True)
class WatchdogEvent:
    """A change in the state of the watchdog."""

    kind: Literal["sensor failed", "sensor works again", "stop requested"]
    text: str
    at: float


class Watchdog:
    """Watches memory while its `with` block runs. An instance can be used once.

    `report` is called from the watchdog's thread, once per change.
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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gracetune-memory-watchdog", daemon=True)
        self._trouble: str | None = None
        self._request: StopRequest | None = None
        self._died: BaseException | None = None
        self.samples = 0
        """The number of samples taken."""

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        # If a sensor hangs in the driver, give up waiting: a daemon thread does not keep the process alive.
        self._thread.join(_JOIN_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def requested(self) -> StopRequest | None:
        """The stop request, if there is one. The loop calls this at every micro-batch; it takes no locks."""
        if self._died is not None:
            raise UnifiedMemoryError(f"the memory watchdog has stopped watching: {self._died!r}") from self._died
        return self._request

    def _run(self) -> None:
        try:
            self._sample()
            while not self._stop.wait(self._period):
                self._sample()
        except BaseException as error:
            self._died = error  # `requested` raises it in the training loop
            raise

    def _sample(self) -> None:
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
        # Report a change of the trouble only, not the same trouble every second.
        previous, self._trouble = self._trouble, text
        if text is not None:
            self._report(WatchdogEvent("sensor failed", text, self._clock()))
        elif previous is not None:
            self._report(WatchdogEvent("sensor works again", f"before: {previous}", self._clock()))
