"""The event log: one line an event, handed to the kernel whole, so that even kill -9 loses none that was emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gracetune.storage.append import LineFile
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


@dataclass(frozen=True)
class Log:
    """What a log file says."""

    records: tuple[Record, ...]
    """As they were written, void ones included."""
    unreadable: tuple[tuple[int, str], ...] = ()
    """Lines that are no events: number and why. One that was torn by a kill is ordinary."""

    def merged(self) -> tuple[Record, ...]:
        return merge(self.records)


def read_log(path: Path) -> Log:
    """TelemetryError where there is none; lines that are no events are listed, never guessed at."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TelemetryError(
            f"event log {path}",
            found=error.strerror or str(error),
            expected="the log of a run",
            hint=f"name the run's folder, the one that holds logs/; `ls {path.parent}`",
        ) from None
    records, unreadable = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            records.append(from_line(line))
        except NotAnEventError as error:
            unreadable.append((number, str(error)))
    return Log(tuple(records), tuple(unreadable))


def merge(records: Sequence[Record]) -> tuple[Record, ...]:
    """One line of history: what was done again after a resume is dropped, and the ends of earlier processes with it."""
    kept: list[Record] = []
    for record in records:
        event = record.event
        if isinstance(event, RunStarted):
            begin = event.resumed_step
            kept = [] if begin is None else [one for one in kept if _stands(one, begin)]
        kept.append(record)
    return tuple(kept)


def _stands(record: Record, resumed_step: int) -> bool:
    if isinstance(record.event, RunEnded):
        return False
    step = step_of(record.event)
    return step is None or step <= resumed_step
