"""The event log: one line an event, handed to the kernel whole, so that even kill -9 loses none that was emitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gracetune.storage.line_file import LineFile
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Record, RunEnded, RunStarted, step_of
from gracetune.telemetry.schema import NotAnEventError, from_line, to_line


class JsonlSink:
    """Appends; the file may be there from an earlier process of the same run."""

    def __init__(self, path: Path) -> None:
        self.name = f"the event log {path}"
        try:
            self._file = LineFile(path)
        except OSError as error:
            raise TelemetryError(
                self.name,
                found=f"it cannot be written: {error.strerror or error}",
                expected="a folder we may write to",
                hint=f"look at `ls -ld {path.parent}` and `df -h {path.parent}`, or set another output_dir",
            ) from None

    def write(self, record: Record) -> None:
        self._file.write(to_line(record))

    def close(self) -> None:
        self._file.close()


class LogLine(NamedTuple):
    """One line of a log."""

    number: int
    begin: int
    """Where it begins, in bytes."""
    record: Record | None
    why: str
    """It is no record, because ... One that was torn by a kill is ordinary."""
    stands: bool
    """False for what was done again after a resume, and for the ends of earlier processes."""


class LogReader:
    """A log file, read line by line as often as asked: that of a long run is larger than a process should hold."""

    def __init__(self, path: Path) -> None:
        """TelemetryError where there is none."""
        self._path = path
        self._limits = _limits(self._resumed_steps())

    def lines(self) -> Iterator[LogLine]:
        """All that are not empty. Those that are no events are told, never guessed at."""
        process = 0
        for number, begin, raw in self._raw_lines():
            try:
                record = from_line(raw)
            except NotAnEventError as error:
                yield LogLine(number, begin, None, str(error), stands=False)
                continue
            process += isinstance(record.event, RunStarted)
            stands = process >= len(self._limits) or _stands(record, self._limits[process])
            yield LogLine(number, begin, record, "", stands)

    def at(self, offsets: Iterable[int]) -> list[Record]:
        """The records of lines that begin there."""
        found = []
        with self._open() as file:
            for offset in offsets:
                file.seek(offset)
                found.append(from_line(file.readline()))
        return found

    def _resumed_steps(self) -> list[int | None]:
        """Of every start."""
        found: list[int | None] = []
        for _, _, raw in self._raw_lines():
            if b"RunStarted" in raw:  # that alone tells nearly all lines; it may be in a warning's text
                with suppress(NotAnEventError):
                    event = from_line(raw).event
                    found += [event.resumed_step] if isinstance(event, RunStarted) else []
        return found

    def _raw_lines(self) -> Iterator[tuple[int, int, bytes]]:
        with self._open() as file:
            begin = 0
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, begin, raw
                begin += len(raw)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise TelemetryError(
                f"event log {self._path}",
                found=error.strerror or str(error),
                expected="the log of a run",
                hint=f"name the run's folder, the one that holds logs/; `ls {self._path.parent}`",
            ) from None


@dataclass(frozen=True)
class EventLog:
    """What a log file says, all of it at once: for short ones."""

    records: tuple[Record, ...]
    """As they were written, void ones included."""
    unreadable: tuple[tuple[int, str], ...] = ()
    """Lines that are no events: number and why."""

    def merged(self) -> tuple[Record, ...]:
        return merge(self.records)


def read_log(path: Path) -> EventLog:
    """TelemetryError where there is none."""
    lines = [*LogReader(path).lines()]
    return EventLog(
        tuple(line.record for line in lines if line.record is not None),
        tuple((line.number, line.why) for line in lines if line.record is None),
    )


def merge(records: Sequence[Record]) -> tuple[Record, ...]:
    """One line of history: what was done again after a resume is dropped, and the ends of earlier processes with it."""
    limits = _limits([one.event.resumed_step for one in records if isinstance(one.event, RunStarted)])
    kept, process = [], 0
    for record in records:
        process += isinstance(record.event, RunStarted)
        if process >= len(limits) or _stands(record, limits[process]):
            kept.append(record)
    return tuple(kept)


def _limits(resumed_steps: Sequence[int | None]) -> list[int | None]:
    """For what comes before the first start, and for every process but the last: up to which step it stands.

    None: a later process began anew, and nothing of it does.
    """
    limits: list[int | None] = []
    anew, least = False, 1 << 63
    for resumed in reversed(resumed_steps):
        if resumed is None:
            anew = True
        else:
            least = min(least, resumed)
        limits.append(None if anew else least)
    return limits[::-1]


def _stands(record: Record, limit: int | None) -> bool:
    if limit is None or isinstance(record.event, RunEnded):
        return False
    step = step_of(record.event)
    return step is None or step <= limit
