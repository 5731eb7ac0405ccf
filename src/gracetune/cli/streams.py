"""Standard output and error that never stop a run.

When a write fails (full disk, closed pipe, lost terminal), the descriptor is redirected to /dev/null and the reason is
kept. From then on no write fails, whether from Python's streams, rich, logging or C libraries. The command decides
what follows: a run continues; a command whose output is its result ends (`GuardedOutput.carries_result`).
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
"""Exit code of a command whose reader closed the pipe: 128 + SIGPIPE, as shells report it for other programs."""
PATIENCE_S = 5.0
"""Seconds to wait for a reader that reads nothing, before lines are left out."""


class OutputLostError(SystemExit):
    """Ends a command whose result cannot be written. `console.start` prints the reason and sets the exit code."""


class RedactedText(io.TextIOWrapper):
    """A text stream that removes secrets, also from what libraries and tracebacks print."""

    redactor = Redactor()

    def write(self, text: str, /) -> int:
        super().write(self.redactor.redact(text))
        return len(text)

    def write_unredacted(self, text: str) -> None:
        """For the one secret that a command exists to print: the link of the studio."""
        super().write(text)
        self.flush()


class GuardedOutput(io.RawIOBase):
    """Writes to a descriptor until a write fails. It has no buffer and no lock, so signal handlers may print too."""

    def __init__(self, name: str, descriptor: int, *, is_open: bool = True) -> None:
        """`is_open` is False for a stream that was closed when the process started; `descriptor` is then /dev/null."""
        super().__init__()
        self.name = name
        self.lost: OSError | None = None
        """The error after which nothing is written any more; None while the stream works."""
        self.carries_result = False
        """Whether a failed write ends the command (`OutputLostError`)."""
        self.on_lost: Callable[[str], None] = lambda text: None
        """Receives one sentence when the stream is lost or its reader is stuck. Called during a write. Not called for a
        stream that was closed from the start: that was done on purpose."""
        self._descriptor, self._is_open = descriptor, is_open
        self._nonblocking: int | None = None
        """A second, non-blocking descriptor of the same pipe or terminal (`leave_out_when_stuck`)."""
        self._left_out: int | None = None
        """Number of lines left out since the reader got stuck; None while it reads."""
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
        """From now on, leave out lines if the reader of a pipe or terminal reads nothing for `PATIENCE_S`.

        Otherwise a pager that is not scrolled, or a terminal behind a dead connection, would block the writer.
        """
        mode = os.fstat(self._descriptor).st_mode
        if self._nonblocking is None and (stat.S_ISFIFO(mode) or os.isatty(self._descriptor)):
            # Open it again for a file description of our own: O_NONBLOCK on the inherited one would affect every
            # process that shares it.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with suppress(OSError):  # a terminal of another user cannot be opened: writes to it may block
                self._nonblocking = os.open(f"/proc/self/fd/{self._descriptor}", flags)

    @property
    def what_is_lost(self) -> str:
        """A sentence for the user; empty while the stream works."""
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
        return self._descriptor if self._nonblocking is None else self._nonblocking

    def _has_room(self, patience_s: float) -> bool:
        """Wait until the descriptor can be written. False if it cannot be written within `patience_s`.

        Without a descriptor of our own, wait without a limit: another process made the shared one non-blocking.
        """
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        return bool(poll.poll(None if self._nonblocking is None else patience_s * 1000))

    def _report_stuck(self) -> None:
        if not self._has_been_stuck:
            self._has_been_stuck = True
            self.on_lost(f"{self.name} accepted no output for {PATIENCE_S:.0f} s: output is dropped until it does")

    def _lose(self, error: OSError) -> None:
        self.lost = error
        with suppress(OSError):  # if /dev/null cannot be opened, `lost` still stops our own writes
            devnull = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(devnull, self._descriptor)
            if self._nonblocking is not None:  # replaced, not closed: another thread may be about to write to it
                os.dup2(devnull, self._nonblocking, inheritable=False)
            os.close(devnull)
        self.on_lost(self.what_is_lost)


def _lines(view: memoryview) -> int:
    return view.tobytes().count(b"\n")


@dataclass(frozen=True)
class StandardStreams:
    """stdout and stderr of this process. None for a stream that a test runner or notebook has replaced."""

    stdout: GuardedOutput | None = None
    stderr: GuardedOutput | None = None

    def serve_a_run(self, on_lost: Callable[[str], None]) -> None:
        """From now on, neither stream stops or delays the command or affects its exit code."""
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.carries_result = False
                stream.on_lost = on_lost
                if stream.lost is not None and stream.lost.errno != errno.EBADF:
                    on_lost(stream.what_is_lost)
        if self.stderr is not None:  # not stdout: it gets the result after the run, and may wait for its reader
            self.stderr.leave_out_when_stuck()

    def close(self) -> OSError | None:
        """Flush both streams. Returns the error that lost the command's result, if any. Later writes raise nothing."""
        with suppress(OutputLostError):
            sys.stdout.flush()
        sys.stderr.flush()
        if self.stdout is None or not self.stdout.carries_result:
            return None
        self.stdout.carries_result = False
        return self.stdout.lost


def open_streams(redactor: Redactor) -> StandardStreams:
    """Guard stdout and stderr, once per process. `redactor` removes secrets from both.

    stdout carries the command's result unless the command changes that (`ignore_lost_stdout`, `serve_a_run`). Closed
    standard descriptors are first opened on /dev/null. Otherwise a file that we open could get the number 2, and C
    libraries would write their errors into it.
    """
    _fill_closed_descriptors()
    sys.stdout, stdout = _guard(sys.stdout, "stdout", 1)
    sys.stderr, stderr = _guard(sys.stderr, "stderr", 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RedactedText):
            stream.redactor = redactor
    if stdout is not None:
        stdout.carries_result = True
    return StandardStreams(stdout, stderr)


def ignore_lost_stdout() -> None:
    """For a command that writes files or acts on a run: its result is not on stdout, so a lost stdout is no error."""
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


def _guard(stream: TextIO | None, name: str, number: int) -> tuple[TextIO, GuardedOutput | None]:
    if stream is None:  # closed at the start: its number may belong to another file by now, so do not write to it
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
    with suppress(OSError):  # text buffered before this call is lost if it cannot be written
        stream.flush()
    return _text(raw, stream.encoding), raw


def _writes_to(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def _text(raw: GuardedOutput, encoding: str) -> TextIO:
    """A line-buffered text stream, even if it is not a terminal."""
    return RedactedText(raw, encoding, errors="backslashreplace", line_buffering=True)
