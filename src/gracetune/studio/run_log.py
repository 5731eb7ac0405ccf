"""The event log of one run: opened fast however long it is, then followed.

Reading a log of a million events line by line takes most of a minute. Here only the beginnings of the lines are looked
at, as arrays: they give each event's kind and offset. A page then parses the events that it shows: all of the rare
kinds up to a limit, and a sample of the steps. What was written since is read from where the last reading ended.

Steps that a resumed run repeats are void (docs/events.md): a step event is valid up to the lowest `resumed_step` of the
processes after it. Steps of one process ascend, so the limit is found by bisection.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gracetune.storage.regular_files import open_regular
from gracetune.studio.log_lines import EVENTS_FILE, MOST_LINE, Fields, parse_line, read_lines, whole
from gracetune.telemetry.events import EVENTS
from gracetune.telemetry.sinks.jsonl import valid_until

MOST_PARSED = 2000
"""Events of a rare kind that are parsed; evenly chosen ones if there are more."""
_CHUNK = 4 << 20
_LATEST_LINE = 1024
"""Bytes that are read for each of the last lines; most are a third as long."""
_MOST_KEPT = 16_000
"""Parsed events that are kept for the next request."""
_PREFIX = np.frombuffer(b'{"v":?,"kind":"', np.uint8)
_NAME = 8
"""Letters of a kind that are looked at. They differ for all kinds."""
_CODES = {int(np.frombuffer(f'{kind.__name__}",'.encode()[:_NAME], "<u8")[0]): kind.__name__ for kind in EVENTS}
_MOST_UNUSUAL = 20_000
"""Lines in another form that are parsed to find their kind."""


@dataclass
class _Index:
    """Where the events of each kind begin."""

    inode: int = 0
    end: int = 0
    """Where the next line begins."""
    kinds: dict[str, array[int]] = field(default_factory=dict)
    unusual: int = 0
    unreadable: int = 0

    def add(self, kind: str, offsets: Sequence[int]) -> None:
        self.kinds.setdefault(kind, array("q")).extend(offsets)

    def of(self, kind: str) -> array[int]:
        return self.kinds.get(kind, array("q"))


class RunLog:
    """The log of one run. Thread-safe. Raises OSError where the log cannot be read."""

    def __init__(self, run: Path) -> None:
        self._path = run / EVENTS_FILE
        self._mutex = threading.Lock()
        self._index = _Index()
        self._parsed: dict[int, Fields] = {}
        self._limits: list[int | None] = []
        """The last valid step of each part of the log but the last; see `valid_until`."""

    def update(self) -> None:
        """Read what was written since the last call."""
        with self._mutex:
            try:
                descriptor = open_regular(self._path)
            except FileNotFoundError:
                self._index, self._parsed, self._limits = _Index(), {}, []
                return
            try:
                self._update(descriptor)
            finally:
                os.close(descriptor)

    def _update(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if self._index.end > found.st_size or self._index.inode != found.st_ino:  # it was replaced
            self._index, self._parsed, self._limits = _Index(inode=found.st_ino), {}, []
        index = self._index
        while index.end < found.st_size:
            data = os.pread(descriptor, _CHUNK, index.end)
            complete = data.rfind(b"\n") + 1
            if not complete and len(data) < _CHUNK:
                break
            if complete:
                _add_lines(index, data[:complete])
            else:  # no line of ours is this long
                index.unreadable += 1
            index.end += complete or len(data)
        if len(index.of("RunStarted")) != len(self._limits):
            started = [self._event(descriptor, at, "RunStarted") or {} for at in index.of("RunStarted")]
            self._limits = valid_until([whole(one.get("resumed_step")) for one in started])

    @property
    def unreadable(self) -> int:
        """Lines that are no events."""
        return self._index.unreadable

    @property
    def size(self) -> int:
        """Bytes read so far."""
        return self._index.end

    def count(self, kind: str) -> int:
        return len(self._index.of(kind))

    def last(self, kind: str) -> Fields:
        """The latest valid event of a kind; empty if there is none."""
        found = self.events(kind, 1, latest=True)
        return found[-1] if found else {}

    def events(self, kind: str, most: int = MOST_PARSED, *, latest: bool = False) -> list[Fields]:
        """The valid events of a kind in order: at most `most`, evenly chosen, or the latest ones."""
        with self._mutex:
            try:
                descriptor = open_regular(self._path)
            except FileNotFoundError:
                return []
            try:
                offsets = self._valid(descriptor, kind)
                chosen = offsets[-most:] if latest else _spread(offsets, most)
                return [event for at in chosen if (event := self._event(descriptor, at, kind)) is not None]
            finally:
                os.close(descriptor)

    def latest(self, most: int) -> list[Fields]:
        """The last events of the log, of all kinds, void ones included."""
        with self._mutex:
            try:
                descriptor = open_regular(self._path)
            except FileNotFoundError:
                return []
            try:
                end = self._index.end
                lines = read_lines(descriptor, max(0, end - most * _LATEST_LINE), end)
                return [event for line in lines if (event := parse_line(line)) is not None][-most:]
            finally:
                os.close(descriptor)

    # -- which events are valid ----------------------------------------------------------------------------------------

    def _valid(self, descriptor: int, kind: str) -> array[int]:
        offsets, found = self._index.of(kind), array("q")
        starts = self._index.of("RunStarted")
        for part, limit in enumerate(self._limits):
            begin = bisect_left(offsets, starts[part - 1] if part else 0)
            end = bisect_left(offsets, starts[part])
            if limit is None or kind == "RunEnded" or begin == end:
                continue
            if kind in ("RunStarted", "Planned"):
                found.extend(offsets[begin:end])
            elif kind == "Warned":  # some have no step, so they are not in order
                found.extend(at for at in offsets[begin:end][-MOST_PARSED:] if self._is_up_to(descriptor, at, limit))
            else:
                found.extend(offsets[begin : self._first_beyond(descriptor, kind, begin, end, limit)])
        last = bisect_left(offsets, starts[-1]) if starts else 0
        found.extend(offsets[last:])
        return found

    def _is_up_to(self, descriptor: int, offset: int, limit: int) -> bool:
        step = whole((self._event(descriptor, offset, "Warned") or {}).get("step"))
        return step is None or step <= limit

    def _first_beyond(self, descriptor: int, kind: str, begin: int, end: int, limit: int) -> int:
        """The position of the first event of a step after `limit`."""
        offsets = self._index.of(kind)

        def step_at(position: int) -> int:
            event = self._event(descriptor, offsets[position], kind) or {}
            return whole(event.get("step")) or 0

        return bisect_right(range(end), limit, lo=begin, key=step_at)

    # -- parsing -------------------------------------------------------------------------------------------------------

    def _event(self, descriptor: int, offset: int, kind: str) -> Fields | None:
        """The event at an offset. Parsed events are kept, because pages ask for the same ones again."""
        event = self._parsed.get(offset)
        if event is None:
            event = parse_line(_line_at(descriptor, offset))
            if event is None or event["kind"] != kind:
                return None
            if len(self._parsed) > _MOST_KEPT:
                self._parsed.clear()
            self._parsed[offset] = event
        return event


def _line_at(descriptor: int, offset: int) -> bytes:
    size = 2048
    while True:
        data = os.pread(descriptor, size, offset)
        end = data.find(b"\n")
        if end >= 0 or len(data) < size or size > MOST_LINE:
            return data[: end if end >= 0 else len(data)]
        size *= 16


def _add_lines(index: _Index, chunk: bytes) -> None:
    """Note the kind and the offset of each line of a chunk, which ends with a line's end."""
    letters = np.frombuffer(chunk + b"\0" * (len(_PREFIX) + _NAME), np.uint8)
    ends = np.flatnonzero(letters[: len(chunk)] == ord("\n"))
    begins = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else np.zeros(1, np.int64)
    heads = letters[begins[:, None] + np.arange(len(_PREFIX) + _NAME)]
    same = heads[:, : len(_PREFIX)] == _PREFIX
    same[:, ord("?") == _PREFIX] = True
    usual = same.all(axis=1)
    codes = np.ascontiguousarray(heads[:, len(_PREFIX) :]).view("<u8")[:, 0]
    for code in np.unique(codes[usual]):
        offsets = begins[usual & (codes == code)] + index.end
        kind = _CODES.get(int(code))
        if kind is None:
            index.unreadable += len(offsets)
        else:
            index.add(kind, offsets.tolist())
    for number in np.flatnonzero(~usual):
        end = ends[number] if number < len(ends) else len(chunk)
        _add_unusual(index, chunk[begins[number] : end], int(begins[number]) + index.end)


def _add_unusual(index: _Index, line: bytes, offset: int) -> None:
    """A line that does not begin like those that we write: written by other code, or damaged."""
    if not line.strip():
        return
    index.unusual += 1
    event = parse_line(line) if index.unusual <= _MOST_UNUSUAL else None
    if event is None or event["kind"] not in _CODES.values():
        index.unreadable += 1
    else:
        index.add(event["kind"], [offset])


def _spread(offsets: array[int], most: int) -> Sequence[int]:
    """At most `most` of the offsets: the first, the last, and one of each of equal parts. Which one varies from part
    to part, so that experts that alternate are all found."""
    count = len(offsets)
    if count <= most:
        return offsets
    inner = most - 2
    chosen = []
    for part in range(inner):
        begin, end = 1 + (count - 2) * part // inner, 1 + (count - 2) * (part + 1) // inner
        chosen.append(offsets[begin + (part * 7919) % max(1, end - begin)])
    return [offsets[0], *chosen, offsets[-1]]
