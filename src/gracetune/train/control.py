"""Requests to a running job: stop, or validate. Signals, files and watchdogs set them; the loop reads them.

The effect of a signal depends on the `Phase`. Before the first step it ends the run at once. During training the
current step is completed and saved. After the last step the final files are completed. The table in docs/training.md
lists the signals.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

Kind = Literal["finished", "interrupted", "failed"]
Phase = Literal["preparing", "training", "finishing"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR2)
"""Signals that stop a run. SIGUSR1 requests a validation; with `stops_on_sigusr1` it stops the run instead."""


@dataclass(frozen=True)
class Stop:
    kind: Kind
    reason: str


class InterruptedBySignal(KeyboardInterrupt):
    """A signal arrived before the first step. Caches are kept, and there is nothing to save yet."""


class Control:
    """Signal handlers and other threads write to this object without a lock: each write is a single assignment."""

    def __init__(self, *, stops_on_sigusr1: bool = False) -> None:
        self.stop: Stop | None = None
        self.validate = False
        """SIGUSR1 requested a validation. The reader of the request (`requested.py`) resets this."""
        self.phase: Phase = "preparing"
        self._stops_on_sigusr1 = stops_on_sigusr1
        self.report: Callable[[str], None] = lambda text: None
        """Shows a line at once."""
        self._has_been_signalled = False

    def ask_to_stop(self, kind: Kind, reason: str) -> None:
        """Request a stop. Only the first request counts."""
        if self.stop is None:
            self.stop = Stop(kind, reason)

    def on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1 and not self._stops_on_sigusr1:
            self.validate = True
            return
        if self._has_been_signalled:
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            return  # the run is already stopping
        self._has_been_signalled = True
        name = signal.Signals(number).name
        if self.phase == "preparing":
            # Python drops exceptions raised inside `__del__` or a GC callback, so the loop checks the request too.
            self.ask_to_stop("interrupted", name)
            raise InterruptedBySignal(name)
        if self.phase == "training":
            self.ask_to_stop("interrupted", name)
            self.report(f"{name}: the step is completed and saved first; Ctrl-C again stops at once")
        else:
            self.report(f"{name}: the files of the run are completed first; Ctrl-C again stops at once")


@contextmanager
def listening(control: Control) -> Iterator[Control]:
    """Pass signals to `control` inside this context, and restore the former handlers afterwards.

    Python allows signal handlers in the main thread only; in other threads this does nothing. An ignored SIGHUP stays
    ignored: a run started with nohup must survive its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield control
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        control.on_signal(number)

    taken = [number for number in (*ENDING, signal.SIGUSR1) if not _is_ignored_hangup(number)]
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield control
    finally:
        for number, former in before.items():
            # None means that a C library had installed the handler. Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if former is None else former)


def _is_ignored_hangup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
