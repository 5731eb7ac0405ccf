"""Render a baseline, or the comparison of two, as text."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import quantiles

from gracetune.baselines.baseline import Baseline
from gracetune.baselines.regression import Comparison, ComparisonRow
from gracetune.telemetry.number_format import duration, number, size

_COLUMNS = ("", "before", "after", "change", "verdict")


def report(baseline: Baseline) -> str:
    """The text of `baseline_report.txt`."""
    return "\n".join((*_head(baseline), "", *_times(baseline), "", *_memory(baseline), "", *_rest(baseline))) + "\n"


def _head(baseline: Baseline) -> Iterator[str]:
    hardware = baseline.hardware
    gpus = ", ".join(hardware.gpus) or "no GPU"
    yield f"Baseline of {baseline.name}, {baseline.date}"
    yield f"  command    {baseline.command or 'unknown'}"
    yield f"  commit     {baseline.git_commit or 'unknown'}"
    cores = "an unknown number of" if hardware.cores is None else str(hardware.cores)
    yield f"  machine    {gpus}; {hardware.cpu or 'an unknown CPU'}, {cores} cores; {hardware.profile}"
    yield f"  trained on {baseline.device}"
    yield "  versions   " + ", ".join(f"{name} {version}" for name, version in baseline.versions.items())
    if baseline.environment:
        yield "  variables  " + ", ".join(f"{name}={value}" for name, value in baseline.environment.items())
    yield f"  config     {baseline.config_fingerprint}"
    for note in baseline.notes:
        yield f"  note       {note}"


def _times(baseline: Baseline) -> Iterator[str]:
    steps = baseline.steps
    yield f"Steps        {len(steps.ms)} measured, {steps.warm_up} before them as warm-up"
    spread = quantiles(steps.ms, n=20, method="inclusive") if len(steps.ms) > 1 else [steps.ms[0]] * 19
    yield (
        f"  step       {number(baseline.step_ms)} ms in the middle; nine of ten between {number(spread[0])} and "
        f"{number(spread[-1])} ms"
    )
    yield f"  throughput {number(baseline.throughput_samples_per_s)} samples/s"
    yield f"  data       {number(sum(steps.data_wait_ms) / len(steps.data_wait_ms))} ms/step waited for"
    yield f"  once       {duration(baseline.compile_s)} in the first batch (compiling, choosing kernels)"
    yield f"  all steps  {duration(baseline.duration_s)}"
    yield f"  probe      {number(baseline.gemm_ms)} ms: {baseline.probe.what}"
    for expert, loss in baseline.final_losses.items():
        yield f"  loss       {number(loss)} at the last step{f', {expert}' if expert else ''}"


def _memory(baseline: Baseline) -> Iterator[str]:
    yield "Memory       at the peak of training, by tier and owner"
    for tier, peak in baseline.memory.peak_bytes.items():
        yield f"  {tier:<10} {size(peak)}"
        for owner, count in baseline.memory.owners_bytes.get(tier, {}).items():
            yield f"    {owner:<18} {size(count)}"


def _rest(baseline: Baseline) -> Iterator[str]:
    yield "Counters     at the last step"
    for name, value in sorted(baseline.counters.items()):
        yield f"  {name:<34} {number(value)}"
    for name, why in sorted(baseline.unavailable.items()):
        yield f"  {name:<34} not available: {why}"
    yield ""
    yield f"nvidia-smi   {baseline.nvidia_smi}"


# -- comparisons -------------------------------------------------------------------------------------------------------


def table(comparison: Comparison) -> str:
    rows = [_COLUMNS, *(_cells(row) for row in comparison.rows)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(4)]
    lines = []
    for name, before, after, change, verdict in rows:
        cells = (f"{name:<{widths[0]}}", f"{before:>{widths[1]}}", f"{after:>{widths[2]}}", f"{change:>{widths[3]}}")
        lines.append("  ".join((*cells, verdict)).rstrip())
    return "\n".join(lines)


def _cells(row: ComparisonRow) -> tuple[str, str, str, str, str]:
    change = "" if row.ratio is None else f"{row.ratio - 1:+.1%}"
    verdict = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
    return row.name, _value(row, row.before), _value(row, row.after), change, verdict


def _value(row: ComparisonRow, value: float) -> str:
    return size(value) if row.unit == "bytes" else f"{number(value)} {row.unit}".rstrip()


def sentence(comparison: Comparison) -> str:
    found = comparison.regressions
    if found:
        return f"REGRESSION beyond {comparison.tolerance:.1%} in {', '.join(row.name for row in found)}"
    if comparison.unclear:
        return f"no regression proven; unclear: {', '.join(row.name for row in comparison.unclear)}"
    hidden = [row.name for row in comparison.rows if row.verdict == "within" and row.reason]
    if hidden:
        return f"no regression proven beyond {comparison.tolerance:.1%}; noise could hide one in {', '.join(hidden)}"
    return f"no regression beyond {comparison.tolerance:.1%}"
