"""The tables of three documents, made from benchmarks/results: what is written there was measured.

performance_table.py            writes them
performance_table.py --check    says whether they are what the results say; exit 1 if not

Needs only the standard library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOTHING = "**Nothing has been measured yet:** there is no row of a real size in `benchmarks/results`, on any GPU."

Result = tuple[str, dict[str, Any]]
"""A file's name, and what is in it."""


def results(folder: Path = RESULTS) -> list[Result]:
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def speed(found: list[Result]) -> str:
    """The rows measured beside a baseline."""
    lines = [
        f"| {_job(row)} | {_ms(row['ms_per_step'])} | {_or_dash(row['baseline_ms'], '{:,.0f}')} "
        f"| {_or_dash(row['ratio'], '{:.2f}x')} | {_or_dash(row['peak_gib'], '{:.1f}')} | {_bar(row)} |"
        for _, row in _measured(found)
        if row["baseline_ms"] is not None
    ]
    if not lines:
        return NOTHING
    head = "| job | ms/step | diffusers with peft or lycoris-lora | speedup | peak GiB | bar |"
    return "\n".join([head, "|" + "---|" * 6, *lines])


def _measured(found: list[Result]) -> list[Result]:
    """Rows of smoke tests say nothing about speed and have no place here."""
    return [
        (name, row)
        for name, result in found
        for row in result.get("rows", [])
        if "samples_ms" in row and not row["smoke"]
    ]


def steps(found: list[Result]) -> str:
    """One line for each measured step."""
    lines = [_step(name, row) for name, row in _measured(found)]
    if not lines:
        return NOTHING
    head = (
        "| job | ms/step | baseline | ratio | tokens/s | TFLOP/s | of the ceiling | with repeats "
        "| peak GiB (estimated) | compile s | gradients' error | bar | where |"
    )
    return "\n".join([head, "|" + "---|" * 13, *lines])


def _job(row: dict[str, Any]) -> str:
    frames = f", {row['frames']} frames" if row["frames"] > 1 else ""
    limit = f", <= {row['memory_limit_gib']:g} GiB" if row.get("memory_limit_gib") else ""
    routing = f", {row['token_routing']:.0%} of the tokens skip blocks" if row.get("token_routing") else ""
    return (
        f"{row['bench']} {row['adapter']} {row['precision']}, batch {row['batch']}, {row['resolution']}{frames}, "
        f"{row['optimizer']}{limit}{routing}"
    )


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _bar(row: dict[str, Any]) -> str:
    mark = {True: "met", False: "**missed**", None: "open"}[row.get("ok")]
    return f"{row['bar']}: {mark}" if row.get("bar") else "-"


def _step(name: str, row: dict[str, Any]) -> str:
    numerics = row.get("numerics")
    cells = [
        f"{_job(row)}, recompute {row['checkpointing']}: {row['policy']}",
        _ms(row["ms_per_step"]),
        _or_dash(row["baseline_ms"], "{:,.0f}"),
        _or_dash(row["ratio"], "{:.2f}x"),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tflops']:.0f}",
        f"{row['model_utilisation']:.0%} of {row['gemm_ceiling_tflops']:.0f}",
        _or_dash(row["hardware_utilisation"], "{:.0%}"),
        f"{_or_dash(row['peak_gib'], '{:.1f}')} ({_or_dash(row['estimated_peak_gib'], '{:.1f}')})",
        f"{row['compile_s']:.0f}",
        "-" if numerics is None else f"{numerics['relative_error']:.1e}",
        _bar(row),
        f"{row['gpu']}, torch {row['versions']['torch']}, [{name}](../benchmarks/results/{name})",
    ]
    return f"| {' | '.join(cells)} |"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def numerics(found: list[Result]) -> str:
    return _rows_of("numerics", found)


def studio(found: list[Result]) -> str:
    return _rows_of("studio", found)


def _rows_of(bench: str, found: list[Result]) -> str:
    lines = [
        f"| {row['name'].replace('_', ' ')} | {row['value']:.2g} {row['unit']} | {row['bar'] or '-'} | {row['detail']} "
        f"| {result['gpu'] or 'CPU'}, [{name}](../benchmarks/results/{name}) |"
        for name, result in found
        if result.get("bench") == bench
        for row in result["rows"]
    ]
    if not lines:
        return "Nothing has been measured yet."
    return "\n".join(["| what | found | bar | | where |", "|---|---|---|---|---|", *lines])


def peers(found: list[Result]) -> str:
    """Other programs' own trainers beside ours, as they were recorded by hand in one session."""
    lines = [
        f"| {row['program']} | {result['commits'][row['program']] or 'not recorded'} | {row['adapter']} "
        f"| {row['setting']} | {row['ms_per_step']:,g} | {_or_dash(row['peak_gib'], '{:g}')} "
        f"| {_or_dash(row['first_step_s'], '{:g}')} |"
        for _, result in found
        if result.get("bench") == "peers"
        for row in result["rows"]
    ]
    head = "| trainer | commit | adapter | setting | ms/step | peak GiB | first step s |"
    return "\n".join([head, "|" + "---|" * 7, *lines]) if lines else NOTHING


TABLES = {"speed": speed, "peers": peers, "steps": steps, "numerics": numerics, "studio": studio}
DOCUMENTS = {
    ROOT / "README.md": ["peers", "speed"],
    ROOT / "docs" / "performance.md": ["steps", "peers", "numerics"],
    ROOT / "docs" / "studio.md": ["studio"],
}


def filled(path: Path, found: list[Result]) -> str:
    """The document with its tables as the results have them."""
    text = path.read_text(encoding="utf-8")
    for name in DOCUMENTS[path]:
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        before, mark, rest = text.partition(begin)
        _, closing, after = rest.partition(end)
        if not mark or not closing:
            raise SystemExit(f"{path}: found no {begin} ... {end}; the table of {name} has to go somewhere")
        text = f"{before}{begin}\n{TABLES[name](found)}\n{end}{after}"
    return text


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    wrong = 0
    for path in DOCUMENTS:
        right = filled(path, results())
        if not arguments:
            path.write_text(right, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != right:
            print(f"{path.name} is not what benchmarks/results say; write it with: python scripts/performance_table.py")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
