"""What others ask of a run: to stop, or to validate. Signals, files and watchdogs set it; the loop reads it.

What a signal does depends on how far the run is (`Phase`): before the first step it ends the run at once, like Ctrl-C
ends any program; while training the step is completed and saved; after the last step the files are completed. The table
in docs/training.md lists the signals.
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


@dataclass(frozen=True)
class Stop:
    kind: Kind
    reason: str


class InterruptedBySignal(KeyboardInterrupt):
    """A signal came before the first step. What is cached stays; there is nothing to save yet."""


class Control:
    """Written from signal handlers and other threads: each entry is one assignment."""

    def __init__(self, *, stops_on_sigusr1: bool = False) -> None:
        self.stop: Stop | None = None
        self.validate = False
        self.phase: Phase = "preparing"
        self._stops_on_sigusr1 = stops_on_sigusr1
        self.report: Callable[[str], None] = lambda text: None
        """Shows a line at once."""
        self._has_been_signalled = False

    def ask_to_stop(self, kind: Kind, reason: str) -> None:
        """The first reason stays."""
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
            return  # what the first one asked for is under way
        self._has_been_signalled = True
        name = signal.Signals(number).name
        if self.phase == "preparing":
            # Python drops what is raised inside `__del__` or a callback of the garbage collector: the loop looks too.
            self.ask_to_stop("interrupted", name)
            raise InterruptedBySignal(name)
        if self.phase == "training":
            self.ask_to_stop("interrupted", name)
            self.report(f"{name}: the step is completed and saved first; Ctrl-C again stops at once")
        else:
            self.report(f"{name}: the files of the run are completed first; Ctrl-C again stops at once")


@contextmanager
def listening(control: Control) -> Iterator[Control]:
    """Signals ask the control, as long as this lasts. Outside the main thread Python takes no handlers.

    SIGHUP stays ignored where it is: whoever started the run with nohup wants it to outlive the terminal.
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
            # None: a handler of a C library, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if former is None else former)


def _is_ignored_hangup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
