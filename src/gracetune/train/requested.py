"""The requests to a running job (`run_requests.py`), read in one place between its steps.

After every step, before anything that carries a request out, all ranks agree on what is requested. Saving and sampling
read the result; a stop is set on the run's `Control`. Each request becomes an event.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.events import RequestServed
from gracetune.train.control import ENDING, Control
from gracetune.train.hooks import Callback, RunEnds, RunStarts, StepEnds
from gracetune.train.job import EvaluatedModel
from gracetune.train.output import RunFolder
from gracetune.train.run_requests import RequestFiles, RequestName
from gracetune.train.view import View

_SHARE = 50
"""Looking for requests takes at most one part in this many of the time: a slow file server must not slow training."""
_SIGNALS = {number.name for number in ENDING}
_Requests = tuple[tuple[RequestName, str], ...]
"""Requests, and how each was made."""


class TakenRequests(Callback):
    """What is requested at the current step; equal on all ranks."""

    def __init__(
        self, folder: RunFolder, model: EvaluatedModel, control: Control, telemetry: Telemetry, view: View, *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._files = RequestFiles(folder.path, view.warn)
        self._model, self._control, self._telemetry, self._clock = model, control, telemetry, clock
        self._next_look = float("-inf")
        self._now: frozenset[RequestName] = frozenset()

    def includes(self, name: RequestName) -> bool:
        return name in self._now

    def start(self, begun: RunStarts) -> None:
        """A stop that was requested while the run was prepared ends it before its first step."""
        self._take(begun.position.step, only_stop=True)

    def step_ends(self, done: StepEnds) -> None:
        self._take(done.step)

    def end(self, ended: RunEnds) -> None:
        """Record a stop by a signal. Its reason begins with the rank that got it, if there are several."""
        name = ended.stop.reason.rpartition(": ")[2]
        if ended.stop.kind == "interrupted" and name in _SIGNALS:
            self._telemetry.emit(RequestServed(request="stop", step=ended.position.step, source=name))

    def _take(self, step: int, *, only_stop: bool = False) -> None:
        runtime = self._model.runtime
        agreed = [one for each in runtime.all_of(self._received(only_stop=only_stop) or None) for one in each]
        self._now = frozenset(name for name, _ in agreed)
        for name, source in dict(agreed).items():
            self._telemetry.emit(RequestServed(request=name, step=step, source=source))
            if name == "stop":
                self._control.ask_to_stop("interrupted", f"gracetune stop ({source})")

    def _received(self, *, only_stop: bool) -> _Requests:
        """The requests that this rank received."""
        found: dict[RequestName, str] = {}
        if self._control.validate and not only_stop:
            self._control.validate = False
            found["validate"] = signal.SIGUSR1.name
        began = self._clock()
        if self._model.runtime.is_main and began >= self._next_look:
            found |= self._files.take(("stop",) if only_stop else None)
            ended = self._clock()
            self._next_look = ended + _SHARE * (ended - began)
        return tuple(found.items())
