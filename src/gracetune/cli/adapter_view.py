"""The output of `gracetune adapter`, as tables and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gracetune.adapters.adapter_files import OpenedAdapter
from gracetune.adapters.formats.layers import algorithm_names
from gracetune.adapters.formats.reading import dtype_of
from gracetune.adapters.state import AdapterState
from gracetune.adapters.statistics import estimate_note, norms, zero_tensors
from gracetune.adapters.verification import Verified
from gracetune.cli.console import mark, shown
from gracetune.config.registry import PROGRAMS
from gracetune.errors import short, visible
from gracetune.units import format_bytes

_SHOWN = 8
"""Entries of a list that are printed."""
_HEADER = (
    "ss_output_name", "modelspec.title", "modelspec.date", "ss_base_model_version", "ss_network_module",
    "sshs_model_hash", "gracetune.training", "training_info", "software",
)  # fmt: skip


@dataclass(frozen=True)
class Converted:
    state: AdapterState
    path: str
    format: str
    error: float | None
    """Relative Frobenius error of a conversion to LoRA."""
    programs: Mapping[str, str | None]
    """Program -> why it loads the file incorrectly; None if it loads it correctly."""


def inspection_json(opened: OpenedAdapter) -> dict[str, Any]:
    tensors, detected = opened.file.tensors, opened.detected
    problems = [str(error) for error in opened.reading.errors()]
    return {
        "file": str(opened.file.path),
        "usable": not problems,
        "family": detected.family,
        "stages": [expert for expert in detected.experts if expert],
        "algorithm": detected.algorithm,
        "format": detected.format,
        "evidence": list(detected.evidence),
        "dtype": str(dtype_of(tensors)).removeprefix("torch."),
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for key, tensor in tensors.items() if not key.endswith("alpha")),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        "adapters": [_state(state) for state in opened.reading.states.values()],
        "programs": opened.programs(),
        "refused_layers": list(opened.reading.broken),
        "not_finite": list(opened.reading.not_finite),
        "zero": list(zero_tensors(tensors)),
        "problems": problems,
        "notes": [*opened.notes, *filter(None, [estimate_note(opened.reading.states.values())])],
        "metadata": dict(opened.file.metadata),
    }


def _state(state: AdapterState) -> dict[str, Any]:
    found = norms(state)
    return {
        "stage": state.expert or None,
        "algorithms": list(algorithm_names(state)),
        "layers": len(state.layers),
        "ranks": _counted(layer.rank for layer in state.layers.values()),
        "alphas": _counted(layer.alpha if layer.rank is not None else None for layer in state.layers.values()),
        "norm": {
            "smallest": _finite(found.smallest),
            "median": _finite(found.median),
            "largest": _finite(found.largest),
            "largest_layer": found.largest_layer,
        },
        "unchanged_layers": list(found.unchanged),
        "not_finite_layers": list(found.not_finite),
    }


def _counted(values: Iterable[float | None]) -> dict[str, int]:
    """Value -> number of layers. The key is "full" for layers without a decomposition, which have no value."""
    counts = Counter("full" if value is None else f"{value:g}" for value in values)
    return dict(counts.most_common())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def print_inspection(report: dict[str, Any], console: Console) -> None:
    console.print(f"{mark(console, ok=report['usable'])} [bold]{shown(report['file'])}[/]")
    table = _table()
    experts = f", {' and '.join(report['stages'])}" if report["stages"] else ""
    table.add_row("family", _plain(report["family"] + experts))
    table.add_row("algorithm", _plain(f"{report['algorithm']}, format {report['format']}"))
    size = f"{report['parameters']:,} parameters in {report['tensors']:,} tensors"
    table.add_row("size", _plain(f"{size}, {report['dtype']}, {format_bytes(report['bytes'])}"))
    for adapter in report["adapters"]:
        name = adapter["stage"] or "adapter"
        table.add_row(name, _plain(f"{adapter['layers']} layers, {_scales(adapter)}"))
        norm = adapter["norm"]
        three = [norm[key] for key in ("smallest", "median", "largest")]
        values = " / ".join("not a number" if value is None else f"{value:.4g}" for value in three)
        largest = norm["largest_layer"] or "no layer is finite"
        table.add_row("norms", _plain(f"{values} (smallest, median, largest: {largest})"))
        for label, key in (("unchanged", "unchanged_layers"), ("not finite", "not_finite_layers")):
            if adapter[key]:
                table.add_row(label, _plain(_some(adapter[key])))
    if report["refused_layers"]:
        table.add_row("rejected", _plain(_some(report["refused_layers"])))
    table.add_row("evidence", _plain("; ".join(report["evidence"])))
    _print_programs(table, report["programs"])
    for key in ("not_finite", "zero"):
        if report[key]:
            table.add_row("NaN or inf" if key == "not_finite" else "zero", _plain(_some(report[key])))
    for key in _HEADER:
        if key in report["metadata"]:
            table.add_row(key, _plain(report["metadata"][key][:200]))
    console.print(table, soft_wrap=False)
    for note in report["notes"]:
        console.print(f"note  {shown(note)}")
    for problem in report["problems"]:
        first, *more = problem.splitlines()
        console.print(f"[bold red]wrong[/] {shown(first)}", *(shown(line) for line in more), sep="\n")


def _scales(adapter: dict[str, Any]) -> str:
    if adapter["ranks"].keys() == {"full"}:
        return "no decomposition: no rank, no alpha"
    return f"rank {_listed_counts(adapter['ranks'])}, alpha {_listed_counts(adapter['alphas'])}"


def _listed_counts(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count} layers)" for value, count in list(counts.items())[:_SHOWN])


# -- convert ----------------------------------------------------------------------------------------------------------


def conversions_json(done: Sequence[Converted], left_out: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "left_out": list(left_out),
        "notes": list(notes),
        "written": [
            {
                "path": one.path,
                "format": one.format,
                "family": one.state.family,
                "stage": one.state.expert or None,
                "algorithms": list(algorithm_names(one.state)),
                "layers": len(one.state.layers),
                "relative_error": one.error,
                "programs": dict(one.programs),
            }
            for one in done
        ],
    }


def print_conversions(done: Sequence[Converted], console: Console) -> None:
    for one in done:
        what = f"{'+'.join(algorithm_names(one.state))} for {one.state.family}"
        expert = f", {one.state.expert}" if one.state.expert else ""
        console.print(f"{mark(console, ok=True)} [bold]{shown(one.path)}[/]")
        console.print(f"    {what}{expert}, {len(one.state.layers)} layers, {one.format}")
        if one.programs:
            console.print(f"    {shown(_right_in(one.programs))}")
        if one.error is not None:
            console.print(f"    the LoRA misses {one.error:.2%} of the change (relative Frobenius error, all layers)")


# -- verify -----------------------------------------------------------------------------------------------------------


def verified_json(opened: OpenedAdapter, against: str, reports: Sequence[Verified]) -> dict[str, Any]:
    return {
        "file": str(opened.file.path),
        "model": against,
        "notes": list(opened.notes),
        "ok": all(report.ok for report in reports),
        "programs": opened.programs(),
        "adapters": [
            {
                "stage": report.expert or None,
                "ok": report.ok,
                "matched": len(report.matched),
                "missing": list(report.missing),
                "unexpected": list(report.unexpected),
                "mismatched": list(report.mismatched),
                "not_finite": list(report.not_finite),
                "left_out": list(report.left_out),
            }
            for report in reports
        ],
    }


def print_verified(opened: OpenedAdapter, against: str, reports: Sequence[Verified], console: Console) -> None:
    for report in reports:
        expert = f" ({report.expert})" if report.expert else ""
        name = shown(str(opened.file.path)) + expert
        console.print(f"{mark(console, ok=report.ok)} [bold]{name}[/] on {shown(against)}")
        table = _table()
        table.add_row("matched", _plain(f"{len(report.matched)} layers"))
        for label, entries in (
            ("missing", report.missing),
            ("unexpected", report.unexpected),
            ("other size", report.mismatched),
            ("NaN or inf", report.not_finite),
            ("left out", report.left_out),
        ):
            if entries:
                table.add_row(label, _plain(f"{len(entries)}: {_some(entries)}"))
        if all(one.ok for one in reports):
            _print_programs(table, opened.programs())
        console.print(table, soft_wrap=False)
    for note in opened.notes:
        console.print(f"note  {shown(note)}")


def _right_in(programs: Mapping[str, str | None]) -> str:
    """A sentence that names the programs that load a file as it was trained."""
    right = [PROGRAMS[program] for program, reason in programs.items() if reason is None]
    return f"loads as it was trained in {', '.join(right)}" if right else "no program loads it as it was trained"


def _print_programs(table: Table, programs: Mapping[str, str | None]) -> None:
    right = [PROGRAMS[program] for program, reason in programs.items() if reason is None]
    if not programs:
        return
    table.add_row("right in", _plain(", ".join(right) or "no program"))
    for program, reason in programs.items():
        if reason is not None:
            table.add_row("wrong in", _plain(f"{PROGRAMS[program]}: {reason}"))


def _plain(text: str) -> Text:
    """Text with control characters made visible: names come from untrusted files and must not control the terminal."""
    return Text(visible(text))


def _table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _some(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(short(entry, 300) for entry in entries[:_SHOWN]) + more
