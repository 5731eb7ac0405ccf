"""The machine: the doctor's report, and the captured baselines below the studio's folder with their comparisons."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gracetune.baselines.baseline import FILE, Baseline, read_baseline
from gracetune.baselines.regression import compare
from gracetune.studio.commands import CommandRunner, SlowWork, reject_errors
from gracetune.studio.replies import json_reply
from gracetune.telemetry.errors import TelemetryError

if TYPE_CHECKING:
    from gracetune.studio.server import Studio

DOCTOR_LIMIT_S = 300.0
TOLERANCE = 0.05
"""That of `gracetune baseline compare`."""
MOST_BASELINES = 200
LARGEST_BASELINE = 32 << 20
MOST_FOLDERS = 20_000
_DEPTH = 5
_SKIPPED = frozenset({"cache", "checkpoints", "samples", "logs", "report", "node_modules"})


class MachineReport:
    """The report of `gracetune doctor`, made once and again on request. It leaves out the allocation test, which would
    take memory from running jobs."""

    def __init__(self, commands: CommandRunner) -> None:
        self._commands, self._lock = commands, threading.Lock()
        self._report: dict[str, Any] | None = None

    def get(self, *, refresh: bool = False) -> dict[str, Any]:
        with self._lock:  # several tabs wait for one examination
            if self._report is None or refresh:
                answer = self._commands.json("doctor", "--skip-allocation", "--json", timeout_s=DOCTOR_LIMIT_S)
                reject_errors(answer)
                self._report = {**answer, "made_s": time.time()}
            return self._report


def baselines(root: Path) -> dict[str, Any]:
    """All baselines by name and date, and the comparison of each with the one before it of the same name."""
    found: list[tuple[Path, Baseline]] = []
    unreadable = []
    search = _Search()
    for path in search.folders(root):
        shown = str(path.relative_to(root))
        try:
            if (path / FILE).stat().st_size > LARGEST_BASELINE:
                unreadable.append({"path": shown, "why": "larger than any baseline"})
            else:
                found.append((path, read_baseline(path)))
        except (TelemetryError, OSError) as error:
            unreadable.append({"path": shown, "why": str(error)})
    found.sort(key=lambda one: (one[1].name, one[1].date, str(one[0])))
    return {
        "baselines": [_row(str(path.relative_to(root)), one) for path, one in found],
        "comparisons": [*_comparisons(root, found)],
        "unreadable": unreadable,
        "incomplete": search.incomplete,
    }


def _comparisons(root: Path, found: Sequence[tuple[Path, Baseline]]) -> Iterator[dict[str, Any]]:
    for (before, one), (after, two) in pairwise(found):
        if one.name != two.name:
            continue
        names = {"a": str(before.relative_to(root)), "b": str(after.relative_to(root))}
        try:
            yield {**names, "why": "", **compare(one, two, TOLERANCE).as_json()}
        except TelemetryError as error:  # of different configs, or measured in different units
            yield {**names, "why": str(error), "rows": []}


def _row(shown: str, one: Baseline) -> dict[str, Any]:
    return {
        "path": shown,
        "name": one.name,
        "date": one.date,
        "device": one.device,
        "hardware": one.hardware.model_dump(mode="json"),
        "versions": dict(one.versions),
        "git_commit": one.git_commit,
        "steps": len(one.steps.ms),
        "step_ms": one.step_ms,
        "samples_per_s": one.throughput_samples_per_s,
        "compile_s": one.compile_s,
        "duration_s": one.duration_s,
        "peak_bytes": dict(one.memory.peak_bytes),
        "final_losses": dict(one.final_losses),
        "unavailable": dict(one.unavailable),
        "notes": list(one.notes),
    }


@dataclass
class _Search:
    """The search for the folders with a baseline."""

    incomplete: str = ""
    """Why not all folders were searched; empty if all were."""

    def folders(self, root: Path) -> Iterator[Path]:
        """The folders with a baseline, the least deep ones first. Links and hidden folders are not followed."""
        waiting, seen, yielded = deque([(str(root), 0)]), 0, 0
        while waiting:
            if seen >= MOST_FOLDERS or yielded >= MOST_BASELINES:
                limit = f"{MOST_FOLDERS:,} folders" if seen >= MOST_FOLDERS else f"{MOST_BASELINES} baselines"
                self.incomplete = f"the search ended after {limit}; to find others, open a folder with fewer of them"
                return
            folder, depth = waiting.popleft()
            seen += 1
            try:
                with os.scandir(folder) as listed:
                    entries = sorted(listed, key=lambda entry: entry.name)
            except OSError:  # a folder of another user, or one that was removed meanwhile
                continue
            for entry in entries:
                if entry.name == FILE and entry.is_file(follow_symlinks=False):
                    yielded += 1
                    yield Path(folder)
                    continue
                is_searched = not entry.name.startswith(".") and entry.name not in _SKIPPED
                if depth < _DEPTH and is_searched and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))


def routes(studio: Studio) -> list[Route]:
    report = MachineReport(studio.commands)
    slow = SlowWork()

    async def show(_request: Request) -> Response:
        return json_reply(await slow.run(report.get))

    async def refresh(_request: Request) -> Response:
        return json_reply(await slow.run(lambda: report.get(refresh=True)))

    async def show_baselines(_request: Request) -> Response:
        return json_reply(await slow.run(baselines, studio.root))

    return [
        Route("/api/machine", show),
        Route("/api/machine/refresh", refresh, methods=["POST"]),
        Route("/api/baselines", show_baselines),
    ]
