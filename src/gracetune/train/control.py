"""What others ask of a running loop: to stop, or to validate. Signals, files and watchdogs set it; the loop reads it.

A first Ctrl-C or SIGTERM lets the window end, saves, and leaves with exit code 3. A second Ctrl-C stops at once.
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


@dataclass(frozen=True)
class Stop:
    kind: Kind
    reason: str


class Control:
    """Written from signal handlers and other threads: each entry is one assignment."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.validate = False

    def ask_to_stop(self, kind: Kind, reason: str) -> None:
        """The first reason stays."""
        if self.stop is None:
            self.stop = Stop(kind, reason)


@contextmanager
def listening(control: Control, say: Callable[[str], None]) -> Iterator[None]:
    """Signals ask the control, as long as this lasts. Outside the main thread Python takes no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if control.stop is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        control.ask_to_stop("interrupted", name)
        say(f"{name}: the window is finished and saved first; Ctrl-C again stops at once")

    def validate(_number: int, _frame: FrameType | None) -> None:
        control.validate = True

    taken = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGUSR1: validate}
    before = {number: signal.signal(number, handler) for number, handler in taken.items()}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
