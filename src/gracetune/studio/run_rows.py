"""The row of a run in the list: read from the head and the tail of its log, however long the log is."""

from __future__ import annotations

import os
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gracetune.studio.log_lines import Fields, items, mapping, number, numbers, open_log, parse_line, text, whole
from gracetune.telemetry.curves import smoothed

HEAD, TAIL = 32 << 10, 48 << 10
_PIECE = 8 << 20
_KINDS = ("RunStarted", "RunEnded", "StepDone", "MemorySampled", "HeldOutLoss", "ValidationDone")
_RARE = re.compile(rb'"kind": ?"(RunStarted|RunEnded|HeldOutLoss|ValidationDone|Warned)"')
_SMOOTHED = 60
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
    steps: list[Fields] = field(default_factory=list)
    """The latest `StepDone` events."""
    warnings: int = 0
    _tail_read_to: int = 0
    _searched: int = 0
    """Offset up to which the middle of a long log has been searched for rare events."""
    _middle_end: int = 0

    def refresh(self) -> bool:
        """Read what is new. Returns whether there was anything. A missing log is an empty one."""
        try:
            found = (self.run / "logs" / "events.jsonl").stat()
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
        return True

    def search_middle(self, most: int = _PIECE) -> bool:
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
        end = data.rfind(b"\n") + 1
        for found in _RARE.finditer(data, 0, end):
            begin = data.rfind(b"\n", 0, found.start()) + 1
            if begin >= 0 and found[1] == b"Warned":
                self.warnings += 1
            elif (event := parse_line(data[begin : data.find(b"\n", found.end())])) is not None:
                self._note(self._searched + begin, event)
        self._searched = self._searched + end if end else self._middle_end  # a line longer than a part: give up
        return self._searched < self._middle_end

    def _clear(self, stamp: Stamp | None) -> bool:
        self.stamp, self.first, self.last, self.steps, self.warnings = stamp, None, {}, [], 0
        self._tail_read_to = self._searched = self._middle_end = 0
        return True

    def _read(self, descriptor: int, size: int) -> None:
        if self._tail_read_to == 0 and size > HEAD + TAIL:
            self._searched = self._add(descriptor, 0, HEAD)
            self._middle_end = self._begin_of_line(descriptor, size - TAIL)
            self._tail_read_to = max(self._middle_end, self._searched)
        elif size - self._tail_read_to > 4 * TAIL and self._searched >= self._middle_end:
            self._searched = self._tail_read_to  # much was written since: its middle is searched later
            self._middle_end = self._begin_of_line(descriptor, size - TAIL)
            self._tail_read_to = max(self._middle_end, self._tail_read_to)
        self._tail_read_to = self._add(descriptor, self._tail_read_to, size)

    def _add(self, descriptor: int, begin: int, end: int) -> int:
        """Add the complete lines of a part of the log, and return where the next part begins."""
        while begin < end:
            data = os.pread(descriptor, min(_PIECE, end - begin), begin)
            complete = data.rfind(b"\n") + 1
            if not complete:
                return end if len(data) >= _PIECE else begin  # a line of this length is skipped
            self._add_lines(data[:complete], begin)
            begin += complete
        return begin

    def _add_lines(self, data: bytes, begin: int) -> None:
        """Only the lines that a row shows are parsed: the latest of each kind, and the latest steps."""
        self.warnings += data.count(b'"kind":"Warned"')
        lines, offset = data.split(b"\n"), begin
        wanted: dict[str, list[tuple[int, bytes]]] = {kind: [] for kind in _KINDS}
        for line in lines:
            kind = _kind_of(line)
            if kind in wanted:
                wanted[kind].append((offset, line))
            offset += len(line) + 1
        for kind, found in wanted.items():
            most = _SMOOTHED if kind == "StepDone" else 1
            first = found[:1] if kind == "RunStarted" and self.first is None else []
            for at, line in [*first, *found[-most:]]:
                event = parse_line(line)
                if event is not None and event["kind"] == kind:
                    self._note(at, event)

    def _note(self, offset: int, event: Fields) -> None:
        kind = event["kind"]
        if kind == "RunStarted" and self.first is None:
            self.first = event
        if kind == "StepDone":
            self.steps = [*self.steps, event][-_SMOOTHED:]
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


def _kind_of(line: bytes) -> str:
    begin = line.find(b'"kind":', 0, 64)
    if begin < 0:
        return ""
    begin = line.find(b'"', begin + 7, begin + 10) + 1
    return line[begin : line.find(b'"', begin, begin + 40)].decode("ascii", "replace") if begin else ""


def state_of(summary: RunSummary, *, is_locked: bool) -> tuple[str, str]:
    """The state of a run and why, from its log and its lock."""
    started, ended = summary.offset("RunStarted"), summary.offset("RunEnded")
    latest = max((number(event.get("time_s")) or 0.0 for _, event in summary.last.values()), default=0.0)
    if is_locked:
        if started < 0 or _config_time(summary.run) > latest + 0.001:
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


def _config_time(run: Path) -> float:
    """When the latest process wrote the run's config, which it does before it trains."""
    try:
        return (run / "config.yaml").stat().st_mtime
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
        "loss_smoothed": smoothed(losses, 20)[-1][1] if losses else None,
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
    times = [found for one in summary.steps if (found := number(one.get("step_ms"))) is not None and found >= 0]
    return statistics.median(times) / 1000 if times else None


def _losses(summary: RunSummary, expert: str) -> list[float]:
    return [
        found
        for one in summary.steps
        if text(one.get("stage")) == expert and (found := number(one.get("loss"))) is not None
    ]


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
    """The relative URL of a file in a run's folder. A file name that is not UTF-8 keeps its bytes."""
    return f"api/runs/{identifier}/files/{quote(path.encode('utf-8', 'surrogateescape'))}"
