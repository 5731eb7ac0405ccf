"""Writes the two files of the report. Each is written atomically."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gracetune.storage.atomic import write_file
from gracetune.telemetry.report.loading_steps import find_outputs, how_to_load
from gracetune.telemetry.report.page import page
from gracetune.telemetry.report.run_history import read_history, summary
from gracetune.telemetry.report.sample_images import grid
from gracetune.telemetry.sinks.jsonl import LogReader

LOG_FILE = Path("logs") / "events.jsonl"


@dataclass(frozen=True)
class WrittenReport:
    html: Path
    json: Path


def write_report(run_folder: Path) -> WrittenReport:
    """Write the report of a finished, crashed or running run. Raises TelemetryError if the run has no event log."""
    run_folder = run_folder.absolute()
    history = read_history(LogReader(run_folder / LOG_FILE))
    outputs = history.end.outputs if history.end is not None and history.end.outputs else find_outputs(run_folder)
    loading_steps = dict(history.end.how_to_load) if history.end is not None else {}
    loading = loading_steps or how_to_load(history.start, outputs, run_folder)
    text = page(
        history,
        images=grid(history.validations, run_folder),
        how_to_load=loading,
        outputs=outputs,
        folder=run_folder,
    )
    facts = json.dumps(summary(history, loading, outputs), ensure_ascii=True, allow_nan=False, default=str)
    report = WrittenReport(run_folder / "report.html", run_folder / "report.json")
    write_file(report.json, f"{facts}\n".encode())
    write_file(report.html, text.encode())
    return report
