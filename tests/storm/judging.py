"""Whether a disturbed run came to the end of an undisturbed one: the same results, and nothing else in its folder."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.commands import Ended
from gracetune.telemetry.events import RunEnded, RunStarted, StepDone
from gracetune.telemetry.sinks.jsonl import read_log
from storm.cases import Case, Disturbance
from storm.scenarios import SECRET

_NAMED = re.compile(r"(?<=shards/)[0-9a-f]{32}(?=\.safetensors)|(?<=-)[0-9a-f]{16}(?=\.json)")
_TRACKED = re.compile(r"(?<=\.tfevents\.).*")
_OPTIONAL = re.compile(r"out/run/(samples/|report\.|logs/tensorboard|cache/scan/)|.*/index\.safetensors$")
"""Where a disk fails, or a signal stops a run, these may be missing: documented. A scan and a cache's index are made
again when needed."""
_REMEDY = re.compile(r"^ *try |run the same command again", re.MULTILINE)
_LOG = "out/run/logs/"


@dataclass(frozen=True)
class Start:
    """One of a case: what disturbed it, and how it ended."""

    disturbance: Disturbance | None
    ended: Ended
    met: tuple[str, ...] = ()
    """The calls that were disturbed, operation and path."""

    @property
    def was_killed(self) -> bool:
        return self.ended.code == -9


def listing(root: Path) -> set[str]:
    """Shards have random names and a killed pass leaves more of them; the name of a scan depends on where the data is;
    every start writes TensorBoard's file anew."""
    names = (str(path.relative_to(root)) for path in root.rglob("*"))
    return {_TRACKED.sub("*", _NAMED.sub("*", name)) for name in names}


def judge(case: Case, root: Path, twin: Path, starts: Sequence[Start]) -> list[str]:
    """What is wrong, in words. The last start was not disturbed."""
    wrong = [found for start in starts for found in _of_start(case, start)]
    if starts[-1].ended.code != 0:
        return [*wrong, f"the same command ends with {starts[-1].ended.code}:\n{starts[-1].ended.errors[-3000:]}"]
    return [*wrong, *_names(case, root, twin), *_contents(root, twin), *_events(root, twin, starts), *_secrets(root)]


def _of_start(case: Case, start: Start) -> Iterator[str]:
    code, text = start.ended.code, start.ended.out + start.ended.errors
    if "Traceback" in text:
        yield f"a traceback:\n{text[-3000:]}"
    if SECRET in text:
        yield "the secret is in the output"
    allowed = {"kill": (-9, 0), "clock": (-9, 0), "signal": (0, 3)}.get(case.kind, (0, 1))
    if start.disturbance is not None and code not in allowed:
        yield f"exit code {code}:\n{text[-3000:]}"
    if start.disturbance is not None and code == 1 and not _REMEDY.search(text):
        yield f"an error that does not say what to do:\n{text[-3000:]}"


def _names(case: Case, root: Path, twin: Path) -> Iterator[str]:
    expected, found = (listing(one) for one in (twin, root))
    missing = expected - found
    if case.group in ("signal", "file error"):
        missing = {name for name in missing if not _OPTIONAL.match(name)}
    if missing:
        yield f"missing: {', '.join(sorted(missing))}"
    if found - expected:
        yield f"left over: {', '.join(sorted(found - expected))}"


def _contents(root: Path, twin: Path) -> Iterator[str]:
    for path in sorted(twin.rglob("*")):
        name = path.relative_to(twin)
        other = root / name
        if "cache" in str(name) or "text" in name.parts or not path.is_file() or not other.is_file():
            continue
        if path.suffix == ".safetensors":
            if _weights(path) != _weights(other):
                yield f"{name} differs"
        elif path.suffix == ".png" and path.read_bytes() != other.read_bytes():
            yield f"{name} differs"
        elif path.suffix == ".lock" and _first_line(path) != _first_line(other):
            yield f"{name} says that something is under way: {_first_line(other)!r}"
    for folder in ("out", "out/run"):
        if (twin / folder).stat().st_mode != (root / folder).stat().st_mode:
            yield f"{folder} has mode {(root / folder).stat().st_mode:o}"


def _first_line(path: Path) -> bytes:
    """The journal; where a file could not be truncated, more comes after it."""
    return path.read_bytes().partition(b"\n")[0]


def _weights(path: Path) -> tuple[Any, bytes]:
    """Of an adapter, a model or a checkpoint's state: everything but the date."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    about = header.pop("__metadata__", {})
    return (header, {key: value for key, value in about.items() if "date" not in key}), data[8 + length :]


def _losses(root: Path) -> list[Any]:
    events = [record.event for record in read_log(root / "out/run/logs/events.jsonl").merged()]
    return [(one.step, one.stage, one.loss, one.grad_norm) for one in events if isinstance(one, StepDone)]


def _events(root: Path, twin: Path, starts: Sequence[Start]) -> Iterator[str]:
    log = read_log(root / "out/run/logs/events.jsonl")
    ends = [record.event.outcome for record in log.merged() if isinstance(record.event, RunEnded)]
    lost = any(_lost_its_log(start) for start in starts)
    if ends != ["finished"] and (ends or not lost):
        yield f"the log's history ends with {ends}"
    if lost:
        return
    if log.unreadable:
        yield f"lines of the log are no events: {log.unreadable}"
    if _losses(root) != _losses(twin):
        yield "the losses differ"
    began, ended = (sum(isinstance(one.event, kind) for one in log.records) for kind in (RunStarted, RunEnded))
    if began - ended > sum(start.was_killed for start in starts):
        yield f"{began} starts and {ended} ends in the log"


def _lost_its_log(start: Start) -> bool:
    """Events are kept in memory while the log cannot be written; if that lasts, the process ends without it."""
    fault = None if start.disturbance is None else start.disturbance.fault
    return fault is not None and not fault.times and any(_LOG in call for call in start.met)


def _secrets(root: Path) -> Iterator[str]:
    for path in sorted((root / "out").rglob("*")):
        if path.is_file() and SECRET.encode() in path.read_bytes():
            if path.name != "config.yaml":
                yield f"the secret is in {path.relative_to(root)}"
            elif path.stat().st_mode & 0o077:
                yield f"config.yaml holds the secret and has mode {path.stat().st_mode & 0o777:o}"
