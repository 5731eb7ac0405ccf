"""Writes the two files of the report. Each is written atomically."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gracetune.storage.atomic import write_file
from gracetune.telemetry.events import RunStarted
from gracetune.telemetry.report.page import page
from gracetune.telemetry.report.run_history import read_history, summary
from gracetune.telemetry.report.sample_images import grid, link_to
from gracetune.telemetry.report.sections import read_sections
from gracetune.telemetry.sinks.jsonl import LogReader

LOG_FILE = Path("logs") / "events.jsonl"
LoadingSteps = Callable[[RunStarted, Sequence[Path]], Mapping[str, str]]
"""Program -> how to load the newest of these adapter files; empty if there are none."""


@dataclass(frozen=True)
class WrittenReport:
    html: Path
    json: Path


def write_report(run_folder: Path, loading_steps: LoadingSteps, *, running: bool = False) -> WrittenReport:
    """Write the report of a finished, crashed or running run. Raises TelemetryError if the run has no event log.

    `loading_steps` reads adapter files, which telemetry cannot. It is not called if the run itself has given the steps.
    `running` is whether a process still trains in the folder.
    """
    run_folder = run_folder.absolute()
    history = read_history(LogReader(run_folder / LOG_FILE), running=running)
    outputs = history.end.outputs if history.end is not None and history.end.outputs else find_outputs(run_folder)
    loading = dict(history.end.how_to_load) if history.end is not None else {}
    if not loading:
        found = [run_folder / name for name in outputs if link_to(name, run_folder) is not None]
        loading = dict(loading_steps(history.start, found))
    text = page(
        history,
        images=grid(history.validations, run_folder),
        how_to_load=loading,
        outputs=outputs,
        folder=run_folder,
        added=read_sections(run_folder, since_s=history.process_began_s),
    )
    facts = json.dumps(summary(history, loading, outputs), ensure_ascii=True, allow_nan=False, default=str)
    report = WrittenReport(run_folder / "report.html", run_folder / "report.json")
    write_file(report.json, f"{facts}\n".encode())
    write_file(report.html, text.encode())
    return report


def find_outputs(run_folder: Path) -> tuple[str, ...]:
    """The adapter files in a run's folder, for a run whose `RunEnded` names no outputs."""
    return tuple(sorted(path.name for path in run_folder.glob("*.safetensors")))
