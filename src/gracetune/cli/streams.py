"""Standard output and error that never stop a command.

A write that fails (a full disk, a closed pipe, a terminal that is gone) points the descriptor at /dev/null and keeps
the reason. From then on nothing fails: not Python's streams, nor rich, logging or C libraries. What it means is up to
the command: a run goes on, and a command whose result is its output ends (`GuardedOutput.carries_result`).
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from gracetune.redaction import Redactor

if TYPE_CHECKING:
    from typing_extensions import Buffer

CLOSED_PIPE = 141
"""Exit code of a command whose reader went away: 128 + SIGPIPE, as a shell reports it of other programs."""
PATIENCE_S = 5.0


class OutputLostError(SystemExit):
    """Ends a command whose result cannot be delivered. `start` says why, and gives the exit code."""


class RedactedText(io.TextIOWrapper):
    """A stream that prints no secret: neither ours, nor what a library or a traceback prints."""

    redactor = Redactor()

    def write(self, text: str, /) -> int:
        super().write(self.redactor.redact(text))
        return len(text)


class GuardedOutput(io.RawIOBase):
    """Writes to a descriptor until that fails. Has no buffer and no lock, so that signal handlers may print too."""

    def __init__(self, name: str, descriptor: int, *, is_open: bool = True) -> None:
        """`is_open` is False for a stream that was closed when the process began: `descriptor` is then /dev/null."""
        super().__init__()
        self.name = name
        self.lost: OSError | None = None
        """Why nothing is written any more."""
        self.carries_result = False
        """Whether a write that fails ends the command (`OutputLostError`)."""
        self.on_lost: Callable[[str], None] = lambda text: None
        """Gets one sentence when the stream is lost, or its reader takes nothing. Called inside a write. A stream that
        was closed from the beginning was closed on purpose: nothing is said of it."""
        self._descriptor, self._is_open = descriptor, is_open
        self._unblocked: int | None = None
        self._left_out: int | None = None
        """Lines, since the reader took something; None while it does."""
        self._has_been_stuck = False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        if not self._is_open:
            self.lost = OSError(errno.EBADF, "it was closed when the command began")
        elif self.lost is None and len(view):
            try:
                self._write_all(view)
            except OSError as error:
                self._lose(error)
        if self.lost is not None and self.carries_result:
            raise OutputLostError(1)
        return len(view)

    def leave_out_when_stuck(self) -> None:
        """From here on a pipe or terminal whose reader takes nothing for `PATIENCE_S` misses lines, instead of keeping
        the writer waiting: a pager nobody scrolls, a terminal behind a dead connection."""
        mode = os.fstat(self._descriptor).st_mode
        if self._unblocked is None and (stat.S_ISFIFO(mode) or os.isatty(self._descriptor)):
            # A description of its own: O_NONBLOCK on the one we were given would be every other process's too.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with suppress(OSError):  # a terminal of another user: it keeps the writer waiting, as it does for others
                self._unblocked = os.open(f"/proc/self/fd/{self._descriptor}", flags)

    @property
    def what_is_lost(self) -> str:
        """Empty while it works."""
        if self.lost is None:
            return ""
        return f"{self.name} cannot be written ({self.lost.strerror}): what follows is not shown there"

    def _write_all(self, view: memoryview) -> None:
        patience = PATIENCE_S
        if self._left_out is not None:
            if not self._has_room(0.0):
                self._left_out += _lines(view)
                return
            notice = f"\n[{self._left_out} lines left out: nothing was read here]\n"
            view, patience = memoryview(notice.encode() + view), 0.0
            self._left_out = None
        while view:
            try:
                view = view[os.write(self._target, view) :]
            except BlockingIOError:
                if not self._has_room(patience):
                    self._left_out = _lines(view)
                    self._report_stuck()
                    return

    @property
    def _target(self) -> int:
        return self._descriptor if self._unblocked is None else self._unblocked

    def _has_room(self, patience_s: float) -> bool:
        """A descriptor that somebody else made non-blocking is waited for, as if it were blocking."""
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        return bool(poll.poll(None if self._unblocked is None else patience_s * 1000))

    def _report_stuck(self) -> None:
        if not self._has_been_stuck:
            self._has_been_stuck = True
            self.on_lost(f"{self.name} took nothing for {PATIENCE_S:.0f} s: output is left out until it does")

    def _lose(self, error: OSError) -> None:
        self.lost = error
        with suppress(OSError):  # without /dev/null, or a free number for it, our own writes end here all the same
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nothing, self._descriptor)
            if self._unblocked is not None:  # replaced, not closed: another thread may be about to write to it
                os.dup2(nothing, self._unblocked, inheritable=False)
            os.close(nothing)
        self.on_lost(self.what_is_lost)


def _lines(view: memoryview) -> int:
    return view.tobytes().count(b"\n")


@dataclass(frozen=True)
class StandardStreams:
    """Both of this process. None for one that something else has replaced, as test runners and notebooks do."""

    stdout: GuardedOutput | None = None
    stderr: GuardedOutput | None = None

    def serve_a_run(self, on_lost: Callable[[str], None]) -> None:
        """From here on neither stops nor delays the command, and its exit code does not depend on them."""
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.carries_result = False
                stream.on_lost = on_lost
                if stream.lost is not None and stream.lost.errno != errno.EBADF:
                    on_lost(stream.what_is_lost)
        if self.stderr is not None:  # stdout gets the result, when all is done: that may wait for its reader
            self.stderr.leave_out_when_stuck()

    def close(self) -> OSError | None:
        """Hand everything over. Why a result was lost, if it was; from here on nothing is raised."""
        with suppress(OutputLostError):
            sys.stdout.flush()
        sys.stderr.flush()
        if self.stdout is None or not self.stdout.carries_result:
            return None
        self.stdout.carries_result = False
        return self.stdout.lost


def open_streams(redactor: Redactor) -> StandardStreams:
    """Make stdout and stderr guarded, once for a process. stdout carries the command's result until it says otherwise.
    What `redactor` knows is not printed.

    Closed standard descriptors are opened on /dev/null first: a file of ours that got the number 2 would be written
    into by every C library that reports an error.
    """
    _fill_closed_descriptors()
    sys.stdout, stdout = _guarded(sys.stdout, "stdout", 1)
    sys.stderr, stderr = _guarded(sys.stderr, "stderr", 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RedactedText):
            stream.redactor = redactor
    if stdout is not None:
        stdout.carries_result = True
    return StandardStreams(stdout, stderr)


def ignore_lost_stdout() -> None:
    """For a command that writes files or acts on a run: stdout only says so, and its exit code is about the work."""
    buffer: object = sys.stdout.buffer if isinstance(sys.stdout, io.TextIOWrapper) else None
    if isinstance(buffer, GuardedOutput):
        buffer.carries_result = False


def _fill_closed_descriptors() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


def _guarded(stream: TextIO | None, name: str, number: int) -> tuple[TextIO, GuardedOutput | None]:
    if stream is None:  # its number may have been taken by a file meanwhile: never write there
        raw = GuardedOutput(name, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), is_open=False)
        return _text(raw, "utf-8"), raw
    if not isinstance(stream, io.TextIOWrapper):
        return stream, None
    buffer: object = stream.buffer
    if isinstance(buffer, GuardedOutput):
        return stream, buffer
    # A terminal that cannot show a character gets its escape, not a traceback.
    stream.reconfigure(errors="backslashreplace")
    if not _writes_to(stream, number):
        return stream, None
    raw = GuardedOutput(name, number)
    with suppress(OSError):  # what was written before us cannot be saved
        stream.flush()
    return _text(raw, stream.encoding), raw


def _writes_to(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def _text(raw: GuardedOutput, encoding: str) -> TextIO:
    """Line by line, whatever it is connected to."""
    return RedactedText(raw, encoding, errors="backslashreplace", line_buffering=True)
