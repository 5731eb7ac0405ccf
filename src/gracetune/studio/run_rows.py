"""The row of a run in the list: read from the head and the tail of its log, however long the log is."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gracetune.studio.log_lines import (
    EVENTS_FILE,
    Fields,
    items,
    mapping,
    number,
    numbers,
    open_log,
    parse_line,
    text,
    whole,
)
from gracetune.telemetry.curves import moving_average

HEAD, TAIL = 16 << 10, 24 << 10
_CHUNK = 8 << 20
_KINDS = ("RunStarted", "RunEnded", "StepDone", "MemorySampled", "HeldOutLoss", "ValidationDone")
_IN_HEAD = ("RunStarted", "HeldOutLoss", "ValidationDone")
"""Kinds whose latest event may be in the head of a long log."""
_RARE = re.compile(rb'"kind": ?"(RunStarted|RunEnded|HeldOutLoss|ValidationDone|Warned)"')
_SMOOTHED = 20
"""Steps over which the row's pace and smoothed loss are taken."""
Stamp = tuple[int, int, int]
"""Size, time of change and inode of a log."""


@dataclass
class RunSummary:
    """The latest event of each kind that a row shows. Grows with the log, and is read again if the log was replaced."""

    run: Path
    stamp: Stamp | None = None
    first: Fields | None = None
    """The first `RunStarted`."""
    last: dict[str, tuple[int, Fields]] = field(default_factory=dict)
    """Kind -> offset and fields of the latest event of this kind."""
    steps: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Expert, loss and duration of the latest steps."""
    warnings: int = 0
    version: int = 0
    """Grows whenever something here changes."""
    _tail_read_to: int = 0
    _searched: int = 0
    """Offset up to which the middle of a long log has been searched for rare events."""
    _middle_end: int = 0

    def refresh(self) -> bool:
        """Read what is new. Returns whether there was anything. A missing log is an empty one."""
        try:
            found = os.stat(f"{self.run}/{EVENTS_FILE}")  # noqa: PTH116 - done for a thousand runs, and `Path` is slow
        except OSError:
            return self._clear(None) if self.stamp is not None else False
        stamp = (found.st_size, found.st_mtime_ns, found.st_ino)
        if stamp == self.stamp:
            return False
        if self.stamp is not None and (stamp[0] < self._tail_read_to or stamp[2] != self.stamp[2]):
            self._clear(None)
        try:
            descriptor = open_log(self.run)
        except OSError:
            return False
        try:
            self._read(descriptor, stamp[0])
        finally:
            os.close(descriptor)
        self.stamp = stamp
        self.version += 1
        return True

    def search_middle(self, most: int = _CHUNK) -> bool:
        """Search a part of a long log for events that neither its head nor its tail holds. Returns whether there is
        more to search."""
        if self._searched >= self._middle_end:
            return False
        try:
            descriptor = open_log(self.run)
        except OSError:
            return False
        try:
            data = os.pread(descriptor, min(most, self._middle_end - self._searched), self._searched)
        finally:
            os.close(descriptor)
        self.version += 1
        end = data.rfind(b"\n") + 1
        for found in _RARE.finditer(data, 0, end):
            begin = data.rfind(b"\n", 0, found.start()) + 1
            if found[1] == b"Warned":
                self.warnings += 1
            elif (event := parse_line(data[begin : data.find(b"\n", found.end())])) is not None:
                self._note(self._searched + begin, event)
        self._searched = self._searched + end if end else self._middle_end  # a line longer than a part: give up
        return self._searched < self._middle_end

    def _clear(self, stamp: Stamp | None) -> bool:
        self.stamp, self.first, self.last, self.steps, self.warnings = stamp, None, {}, [], 0
        self._tail_read_to = self._searched = self._middle_end = 0
        self.version += 1
        return True

    def _read(self, descriptor: int, size: int) -> None:
        if self._tail_read_to == 0 and size > HEAD + TAIL:
            self._searched = self._add(descriptor, 0, HEAD, _IN_HEAD)
            self._middle_end = self._begin_of_line(descriptor, size - TAIL)
            self._tail_read_to = max(self._middle_end, self._searched)
        elif size - self._tail_read_to > 4 * TAIL and self._searched >= self._middle_end:
            self._searched = self._tail_read_to  # much was written since: its middle is searched later
            self._middle_end = self._begin_of_line(descriptor, size - TAIL)
            self._tail_read_to = max(self._middle_end, self._tail_read_to)
        self._tail_read_to = self._add(descriptor, self._tail_read_to, size)

    def _add(self, descriptor: int, begin: int, end: int, kinds: Sequence[str] = _KINDS) -> int:
        """Add the complete lines of a part of the log, and return where the next part begins."""
        while begin < end:
            data = os.pread(descriptor, min(_CHUNK, end - begin), begin)
            complete = data.rfind(b"\n") + 1
            if not complete:
                return end if len(data) >= _CHUNK else begin  # a line of this length is skipped
            self._add_lines(data[:complete], begin, kinds)
            begin += complete
        return begin

    def _add_lines(self, data: bytes, begin: int, kinds: Sequence[str]) -> None:
        """Only the lines that a row shows are parsed: the latest of each kind, and the latest steps."""
        self.warnings += data.count(b'"kind":"Warned"')
        if self.first is None:
            for at, event in _found(data, "RunStarted", 1, from_end=False):
                self._note(begin + at, event)
        for kind in kinds:
            found = _found(data, kind, _SMOOTHED if kind == "StepDone" else 1, from_end=True)
            for at, event in reversed(found):
                self._note(begin + at, event)

    def _note(self, offset: int, event: Fields) -> None:
        kind = event["kind"]
        if kind == "RunStarted" and self.first is None:
            self.first = event
        if kind == "StepDone":
            self.steps = [*self.steps, (text(event.get("stage")), event.get("loss"), event.get("step_ms"))][-_SMOOTHED:]
        if kind in _KINDS and offset >= self.last.get(kind, (-1, {}))[0]:
            self.last[kind] = (offset, event)

    @staticmethod
    def _begin_of_line(descriptor: int, offset: int) -> int:
        data = os.pread(descriptor, TAIL, offset)
        return offset + data.find(b"\n") + 1

    # -- what the row shows --------------------------------------------------------------------------------------------

    def event(self, kind: str) -> Fields:
        return self.last.get(kind, (-1, {}))[1]

    def offset(self, kind: str) -> int:
        return self.last.get(kind, (-1, {}))[0]


def _found(data: bytes, kind: str, most: int, *, from_end: bool) -> list[tuple[int, Fields]]:
    """Offsets and fields of the last events of a kind, the last one first; or of the first ones. Other lines are not
    parsed: quotes in a text are escaped in JSON, so the kind is rarely found in another place."""
    sought, found, tries = f'"kind":"{kind}"'.encode(), list[tuple[int, Fields]](), 4 * most
    low, high = 0, len(data)
    while len(found) < most and tries:
        tries -= 1
        at = data.rfind(sought, low, high) if from_end else data.find(sought, low, high)
        if at < 0:
            break
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        event = parse_line(data[begin : end if end >= 0 else len(data)])
        if event is not None and event["kind"] == kind:
            found.append((begin, event))
        low, high = (low, begin) if from_end else (end if end >= 0 else len(data), high)
    return found


def state_of(summary: RunSummary, *, is_locked: bool) -> tuple[str, str]:
    """The state of a run and why, from its log and its lock."""
    started, ended = summary.offset("RunStarted"), summary.offset("RunEnded")
    latest = max((number(event.get("time_s")) or 0.0 for _, event in summary.last.values()), default=0.0)
    if is_locked:
        if started < 0 or config_time(summary.run) > latest + 0.001:
            return "preparing", "the process has not begun to train"
        if started > ended:
            return "running", ""
    if ended > started or (ended >= 0 and started < 0):
        end = summary.event("RunEnded")
        state = {"finished": "finished", "interrupted": "stopped"}.get(text(end.get("outcome")), "failed")
        return state, text(end.get("reason"))
    if started >= 0:
        return "stale", "no process holds the run's lock, and its log has no end: it was killed"
    return "stale", "the process ended before training began"


def config_time(run: Path) -> float:
    """When the latest process wrote the run's config, which it does before it trains."""
    try:
        return os.stat(f"{run}/config.yaml").st_mtime  # noqa: PTH116 - as above
    except OSError:
        return 0.0


def row_of(summary: RunSummary, identifier: str, shown_path: str, *, is_locked: bool) -> dict[str, Any]:
    start, step = summary.event("RunStarted") or summary.first or {}, summary.event("StepDone")
    state, reason = state_of(summary, is_locked=is_locked)
    done, total = _step_of(summary, start), whole(start.get("total_steps"))
    seconds = _seconds_per_step(summary)
    times = [found for _, event in summary.last.values() if (found := number(event.get("time_s"))) is not None]
    left = None if total is None or seconds is None or state != "running" else max(0, total - done) * seconds
    losses = [(float(index), loss) for index, loss in enumerate(_losses(summary, text(step.get("stage"))))]
    return {
        "id": identifier,
        "path": shown_path,
        "name": text(start.get("run"), 200) or summary.run.name,
        "state": state,
        "reason": reason,
        "family": text(start.get("family"), 100),
        "model": text(start.get("model"), 300),
        "adapter": text(start.get("adapter"), 100),
        "step": done,
        "total_steps": total,
        "epoch": whole(step.get("epoch")),
        "loss": number(step.get("loss")),
        "loss_smoothed": moving_average(losses, 20)[-1][1] if losses else None,
        "held_out": number(summary.event("HeldOutLoss").get("mean")),
        "seconds_per_step": seconds,
        "eta_s": left,
        "memory": _memory(summary.event("MemorySampled")),
        "machine": text(start.get("machine"), 300),
        "began_s": number((summary.first or start).get("time_s")),
        "updated_s": max(times, default=None),
        "thumbnail": _thumbnail(summary.event("ValidationDone"), identifier),
        "warnings": summary.warnings,
    }


def _step_of(summary: RunSummary, start: Fields) -> int:
    """Optimizer steps done. Events before the last `RunStarted` count up to the step that it resumed from."""
    resumed = whole(start.get("resumed_step")) or 0
    began = summary.offset("RunStarted")
    later = [
        whole(event.get("step")) or 0
        for kind, (offset, event) in summary.last.items()
        if kind in ("StepDone", "RunEnded") and offset > began
    ]
    return max([resumed, *later])


def _seconds_per_step(summary: RunSummary) -> float | None:
    times = [found for _, _, one in summary.steps if (found := number(one)) is not None and found >= 0]
    return statistics.median(times) / 1000 if times else None


def _losses(summary: RunSummary, expert: str) -> list[float]:
    return [found for stage, one, _ in summary.steps if stage == expert and (found := number(one)) is not None]


def _memory(sampled: Fields) -> dict[str, Any] | None:
    used = mapping(sampled.get("used_bytes"))
    tier = next((name for name in ("device", "host", *used) if name in used), None)
    if tier is None:
        return None
    capacity = whole(mapping(sampled.get("capacity_bytes")).get(tier))
    return {"tier": tier, "used_bytes": int(sum(numbers(used[tier]).values())), "capacity_bytes": capacity}


def _thumbnail(validation: Fields, identifier: str) -> str | None:
    for one in items(validation.get("files")):
        path = text(mapping(one).get("path"), 4096)
        if mapping(one).get("kind") == "image" and path:
            return file_url(identifier, path)
    return None


def file_url(identifier: str, path: str) -> str:
    """The relative URL of a file in a run's folder. A file name that is not UTF-8 keeps its bytes. A log may name files
    that cannot exist: their URL leads to none."""
    try:
        name = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        name = path.encode("utf-8", "replace")
    return f"api/runs/{identifier}/files/{quote(name)}"
