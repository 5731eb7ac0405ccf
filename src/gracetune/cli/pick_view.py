"""The output of `gracetune adapter pick`: a table, JSON, and a section of the run's report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gracetune.adapters.checkpoint_choice import Candidate, CheckpointChoice
from gracetune.cli.console import mark, shown
from gracetune.telemetry.report.sections import ReportCard, ReportSection

UNKNOWN = "unknown"
_MOST_SAMPLES = 6


def print_choice(choice: CheckpointChoice, report: Path, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "step", "held-out loss", "drift", "samples", "file"):
        table.add_column(name, justify="right" if name in ("step", "held-out loss", "drift") else "left")
    for one in choice.candidates:
        chosen = mark(console, ok=True) if one is choice.recommended else ""
        samples = str(len(one.samples)) if one.samples else UNKNOWN
        files = ", ".join(path.name for path in one.files)
        table.add_row(chosen, f"{one.step:,}", _losses(one), _drift(one), samples, shown(files))
    console.print(table)
    console.print(shown(_verdict(choice)))
    for note in choice.notes:
        console.print(shown(f"note: {note}"))
    console.print(f"side by side: {shown(str(report))}")


def choice_json(choice: CheckpointChoice, report: Path) -> dict[str, Any]:
    return {
        "recommended": None if choice.recommended is None else choice.recommended.step,
        "files": [] if choice.recommended is None else [str(path) for path in choice.recommended.files],
        "reason": choice.reason,
        "base_held_out_loss": choice.base_loss,
        "candidates": [
            {
                "step": one.step,
                "files": [str(path) for path in one.files],
                "held_out_loss": one.loss,
                "held_out_losses": dict(one.held_out),
                "drift": dict(one.drift),
                "norm": {name: value if math.isfinite(value) else None for name, value in one.norm.items()},
                "samples": [file.path for file in one.samples],
            }
            for one in choice.candidates
        ],
        "notes": list(choice.notes),
        "report": str(report),
    }


def as_section(choice: CheckpointChoice) -> ReportSection:
    cards = []
    for one in choice.candidates:
        recommended = " (recommended)" if one is choice.recommended else ""
        text = f"Held-out loss {_losses(one)}, drift {_drift(one)}. {', '.join(path.name for path in one.files)}"
        images = tuple((file.path, file.prompt or file.kind) for file in one.samples[:_MOST_SAMPLES])
        cards.append(ReportCard(f"Step {one.step:,}{recommended}", text, images))
    explained = "Drift is the size of the adapter's change relative to the size of the weights that it changes."
    return ReportSection("Which checkpoint?", (_verdict(choice), explained, *choice.notes), tuple(cards))


def _verdict(choice: CheckpointChoice) -> str:
    if choice.recommended is None:
        return f"no recommendation: {choice.reason}"
    return f"recommended: step {choice.recommended.step:,}, because {choice.reason}"


def _losses(one: Candidate) -> str:
    if not one.held_out:
        return UNKNOWN
    return _by_expert({name: f"{value:.4g}" for name, value in one.held_out.items()})


def _drift(one: Candidate) -> str:
    return _by_expert({name: f"{100 * value:.3g} %" for name, value in one.drift.items()}) or UNKNOWN


def _by_expert(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}".strip() for name, value in values.items())
