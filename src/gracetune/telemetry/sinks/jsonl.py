"""The event log. Each event is one line, written without buffering, so that kill -9 loses no emitted event."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gracetune.storage.atomic import LineFile
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Event, Record, RunEnded, RunStarted, step_of
from gracetune.telemetry.schema import NotAnEventError, from_line, to_line

_KEPT_BYTES = 32 << 20
"""Memory for events that cannot be written."""


class JsonlSink:
    """Appends events to the log, which may exist from an earlier process of the same run.

    If the log cannot be written (a full disk, an unreachable file server), events are kept in memory and written in
    order once it can be. An attempt may block for long, so attempts take at most a tenth of the time. `close` warns of
    events that never were written.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`warn` takes a message for the user."""
        self.name = f"the event log {path}"
        self._path, self._warn, self._clock = path, warn, clock
        self._waiting = _WaitingLines()
        self._why = ""  # of the last failed attempt
        self._next_attempt = 0.0
        try:
            self._file: LineFile | None = LineFile(path)
        except OSError as error:
            raise TelemetryError(
                self.name,
                found=f"it cannot be written: {error.strerror or error}",
                expected="a folder we may write to",
                hint=f"look at `ls -ld {path.parent}` and `df -h {path.parent}`, or set another output_dir",
            ) from None

    def write(self, record: Record) -> None:
        self._waiting.add(type(record.event), to_line(record))
        # The report follows `RunEnded` and reads the log.
        if self._clock() >= self._next_attempt or isinstance(record.event, RunEnded):
            self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        if lost := self._waiting.dropped + len(self._waiting.lines):
            self._warn(f"{lost:,} events are not in {self._path}: it could not be written ({self._why})")
        if self._file is not None:
            self._file.close()

    def _write_waiting(self) -> None:
        began = self._clock()
        try:
            if self._file is None:  # a file server that comes back gives new descriptors only
                self._file = LineFile(self._path)
            while self._waiting.lines:
                self._file.write(self._waiting.lines[0][1])
                self._waiting.remove_first()
        except OSError as error:
            self._postpone(error)
            ended = self._clock()
            self._next_attempt = ended + 9 * (ended - began)

    def _postpone(self, error: OSError) -> None:
        is_first, self._why = not self._why, error.strerror or str(error)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        if is_first:
            self._warn(
                f"{self.name} cannot be written ({self._why}): events are kept in memory and written when it can be; "
                f"look at `df -h {self._path.parent}`"
            )


class _WaitingLines:
    """Lines that are not written yet, in order. Where they need too much memory, frequent kinds of events are thinned
    out."""

    def __init__(self) -> None:
        self.lines: deque[tuple[type[Event], bytes]] = deque()
        self.dropped = 0
        self._size = 0

    def add(self, kind: type[Event], line: bytes) -> None:
        self.lines.append((kind, line))
        self._size += len(line)
        if self._size > _KEPT_BYTES:
            self._thin_out()

    def remove_first(self) -> None:
        self._size -= len(self.lines.popleft()[1])

    def _thin_out(self) -> None:
        """Drop every second event of the kind that needs the most memory."""
        sizes: Counter[type[Event]] = Counter()
        for kind, line in self.lines:
            sizes[kind] += len(line)
        largest, number = max(sizes, key=sizes.__getitem__), count()
        kept = [one for one in self.lines if one[0] is not largest or next(number) % 2 == 0]
        self.dropped += len(self.lines) - len(kept)
        self.lines, self._size = deque(kept), sum(len(line) for _, line in kept)


class LogLine(NamedTuple):
    """One line of a log."""

    number: int
    begin: int
    """Byte offset of the line."""
    record: Record | None
    why: str
    """Why the line has no record; empty if it has one. A kill may leave an incomplete line."""
    is_valid: bool
    """False for steps that were repeated after a resume, and for the `RunEnded` of earlier processes."""


class LogReader:
    """Reads a log file line by line, any number of times. The log of a long run is too large to hold in memory."""

    def __init__(self, path: Path) -> None:
        """Raises TelemetryError if the file cannot be read."""
        self._path = path
        self._limits = valid_until(self._resumed_steps())

    def lines(self) -> Iterator[LogLine]:
        """All lines but empty ones. A line that is not an event has no record; its `why` gives the reason."""
        process = 0
        for number, begin, raw in self._raw_lines():
            try:
                record = from_line(raw)
            except NotAnEventError as error:
                yield LogLine(number, begin, None, str(error), is_valid=False)
                continue
            process += isinstance(record.event, RunStarted)
            is_valid = process >= len(self._limits) or _is_valid(record, self._limits[process])
            yield LogLine(number, begin, record, "", is_valid)

    def at(self, offsets: Iterable[int]) -> list[Record]:
        """The records of the lines at these byte offsets."""
        found = []
        with self._opened() as file:
            for offset in offsets:
                file.seek(offset)
                found.append(from_line(file.readline()))
        return found

    def _resumed_steps(self) -> list[int | None]:
        """The `resumed_step` of every `RunStarted`."""
        found: list[int | None] = []
        for _, _, raw in self._raw_lines():
            if b"RunStarted" in raw:  # skips nearly all lines without parsing; a warning's text may contain it too
                with suppress(NotAnEventError):
                    event = from_line(raw).event
                    found += [event.resumed_step] if isinstance(event, RunStarted) else []
        return found

    def _raw_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Line number (from 1), byte offset and bytes of each line that is not empty."""
        with self._opened() as file:
            begin = 0
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, begin, raw
                begin += len(raw)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            hint = f"name the run's folder, the one that holds logs/; `ls {self._path.parent}`"
            raise self._unreadable(error, "the log of a run", hint) from None
        except OSError as error:
            hint = (
                f"look at `ls -l {self._path}`, `findmnt -T {self._path}` and `dmesg`; then run the same command again"
            )
            raise self._unreadable(error, "a file that can be read", hint) from None

    def _unreadable(self, error: OSError, expected: str, hint: str) -> TelemetryError:
        return TelemetryError(
            f"event log {self._path}", found=error.strerror or str(error), expected=expected, hint=hint
        )


@dataclass(frozen=True)
class EventLog:
    """A whole log in memory, for short logs."""

    records: tuple[Record, ...]
    """In the order of the file, void ones included."""
    unreadable: tuple[tuple[int, str], ...] = ()
    """Lines that are not events: line number and reason."""

    def merged(self) -> tuple[Record, ...]:
        return merge(self.records)


def read_log(path: Path) -> EventLog:
    """The whole log in memory. Raises TelemetryError if the file cannot be read."""
    lines = [*LogReader(path).lines()]
    return EventLog(
        tuple(line.record for line in lines if line.record is not None),
        tuple((line.number, line.why) for line in lines if line.record is None),
    )


def merge(records: Sequence[Record]) -> tuple[Record, ...]:
    """One history: steps that were repeated after a resume are dropped, and so are the ends of earlier processes."""
    limits = valid_until([one.event.resumed_step for one in records if isinstance(one.event, RunStarted)])
    kept, process = [], 0
    for record in records:
        process += isinstance(record.event, RunStarted)
        if process >= len(limits) or _is_valid(record, limits[process]):
            kept.append(record)
    return tuple(kept)


def valid_until(resumed_steps: Sequence[int | None]) -> list[int | None]:
    """The last valid step of each part of a log but the last: what precedes the first `RunStarted`, then each process.

    It is the lowest step that any later process resumed from, because that process repeats the steps after it. None:
    a later process started from the beginning, so nothing in this part is valid.
    """
    limits: list[int | None] = []
    restarted, lowest = False, 1 << 63  # of the processes after the current one
    for resumed in reversed(resumed_steps):
        if resumed is None:
            restarted = True
        else:
            lowest = min(lowest, resumed)
        limits.append(None if restarted else lowest)
    return limits[::-1]


def _is_valid(record: Record, limit: int | None) -> bool:
    if limit is None or isinstance(record.event, RunEnded):
        return False
    step = step_of(record.event)
    return step is None or step <= limit
