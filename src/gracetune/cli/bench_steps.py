"""`gracetune bench wan14b|qwen|flux|sdxl|z-image|suite`: benchmarks of a whole training step (docs/performance.md).

A row is the measurement of one configuration. A bar is the result that a row of the suite has to reach.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from gracetune import __version__
from gracetune.bench.results import command_line, git_commit, result_of, write_result
from gracetune.cli.bench import AsJson, Output
from gracetune.cli.console import out, print_json
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe
from gracetune.units import parse_bytes

if TYPE_CHECKING:
    from gracetune.bench.step.measurement import Bench
    from gracetune.bench.step.row import StepRow

_MODELS = {
    "wan14b": "Measure a training step of Wan2.2-T2V-14B (one expert).",
    "qwen": "Measure a training step of Qwen-Image.",
    "flux": "Measure a training step of FLUX.1-dev.",
    "sdxl": "Measure a training step of SDXL.",
    "z-image": "Measure a training step of Z-Image.",
}

Adapter = Annotated[
    Literal["lora", "lokr", "loha", "dora"], typer.Option(help="Adapter, of rank 16; lokr: full rank, factor 16.")
]
Precision = Annotated[Literal["bf16", "fp8"], typer.Option(help="Precision of the frozen weights.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Samples per step.")]
Resolution = Annotated[str, typer.Option(metavar="R", help="Side in pixels, or WIDTHxHEIGHT.")]
Frames = Annotated[int, typer.Option(metavar="F", help="Frames per clip; 1: an image.")]
Checkpointing = Annotated[Literal["off", "auto", "full"], typer.Option(help="Gradient checkpointing, as in a config.")]
Optimizer = Annotated[Literal["adamw", "automagic"], typer.Option(help="Optimizer, as in a config.")]
Limit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="Limit GPU memory, such as to 45GiB.")
]
Baseline = Annotated[bool, typer.Option("--baseline", help="Also time diffusers with peft or lycoris-lora.")]
Steps = Annotated[int, typer.Option(metavar="N", help="Number of timed steps.")]
Routing = Annotated[
    float, typer.Option(metavar="SHARE", help="Also time a step in which this share of the tokens skips blocks.")
]
Smoke = Annotated[bool, typer.Option("--smoke", help="Use a tiny model, on a CPU too, to check that everything runs.")]


def add_step_benches(app: typer.Typer) -> None:
    """Add one command for each model, and `suite`."""
    for name, title in _MODELS.items():
        _add(app, name, title)
    app.command("suite")(suite)


def _add(app: typer.Typer, name: str, title: str) -> None:
    @app.command(name, help=f"{title} Uses random weights and data, and the trainer's own step.")
    def command(
        adapter: Adapter = "lora",
        precision: Precision = "bf16",
        batch: Batch = 1,
        resolution: Resolution = "1024",
        frames: Frames = 1,
        checkpointing: Checkpointing = "auto",
        optimizer: Optimizer = "adamw",
        memory_limit: Limit = None,
        baseline: Baseline = False,
        steps: Steps = 20,
        token_routing: Routing = 0.0,
        smoke: Smoke = False,
        output: Output = None,
        as_json: AsJson = False,
    ) -> None:
        from gracetune.bench.step.job import StepJob, check_job, parse_resolution

        width, height = parse_resolution(resolution)
        job = StepJob(
            name, adapter, precision, batch, width, height, frames, checkpointing, optimizer, _bytes(memory_limit),
            baseline, steps, smoke, token_routing,
        )  # fmt: skip
        job = check_job(job)
        with _opened() as (bench, machine):
            rows = bench.rows(job)
        _finish(name, rows, machine, output, as_json=as_json)


def suite(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this row only; repeatable. Default: all rows.")
    ] = None,
    steps: Steps = 20,
    smoke: Smoke = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure every row of Wan2.2-14B that has a bar, in one process. The file is written after each row."""
    from gracetune.bench.step.suite import choose_tasks, measure_tasks

    choose_tasks(only or ())  # a misspelt name is an error before anything is loaded
    if output is not None:
        ignore_lost_stdout()
    rows: list[StepRow] = []
    # Created before `_opened` redirects stdout, so that it keeps the real one.
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True)
    with _opened() as (bench, machine):
        for row in measure_tasks(bench, only or (), steps=steps, smoke=smoke):
            rows.append(row)
            if output is not None:
                write_result(output, result_of("suite", rows, machine))
            print_step(console, row)
    _finish("suite", rows, machine, output, as_json=as_json, was_printed=True)


@contextlib.contextmanager
def _opened() -> Iterator[tuple[Bench, Machine]]:
    """The benches of this machine, with stdout redirected to stderr."""
    from gracetune.bench.step.measurement import Stamp, open_bench, versions_of
    from gracetune.cli.library_output import libraries_quiet

    machine = probe()
    stamp = Stamp(command_line(), git_commit(), versions_of(machine, __version__))
    # Libraries print to stdout, which is reserved for the result.
    with contextlib.redirect_stdout(sys.stderr), libraries_quiet(), open_bench(machine, stamp, _print) as bench:
        yield bench, machine


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finish(
    name: str, rows: list[StepRow], machine: Machine, output: Path | None, *, as_json: bool, was_printed: bool = False
) -> None:
    result = result_of(name, rows, machine)
    if output is not None:
        write_result(output, result)
    if as_json:
        print_json(result)
    elif not was_printed:
        for row in rows:
            print_step(out(), row)
    raise typer.Exit(1 if any(row.ok is False for row in rows) else 0)


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError([Problem("--memory-limit", text, "a size", str(error))]) from None


def print_step(console: Console, row: StepRow) -> None:
    """Print a row as text."""
    marks = {True: "[green]ok[/]", False: "[bold red]MISS[/]", None: ""}
    frames = f", {row.frames} frames" if row.frames > 1 else ""
    what = f"{row.bench} {row.adapter} {row.precision}, batch {row.batch}, {row.resolution}{frames}, {row.optimizer}"
    smoke = "  [yellow]smoke: a tiny model, the figures mean nothing[/]" if row.smoke else ""
    console.print(f"[bold]{escape(row.name or row.bench)}[/]  {escape(what)}{smoke}")
    for label, value in _figures(row):
        console.print(f"    {label:<12} {escape(value)}")
    if row.bar:
        console.print(f"    {'bar':<12} {escape(row.bar)}  {marks[row.ok]}".rstrip())
    for line in row.reasons:
        console.print(f"    {escape(line)}", style="dim")


def _figures(row: StepRow) -> Iterator[tuple[str, str]]:
    yield "step", f"{row.ms_per_step:.1f} ms (median of {len(row.samples_ms)}), {row.tokens_per_s:,.0f} tokens/s"
    share = f"{row.model_utilisation:.0%} of {row.gemm_ceiling_tflops:.4g} TFLOP/s ({row.gemm_shape})"
    hardware = row.hardware_utilisation
    with_recompute = "unknown: the compiler chose what to recompute" if hardware is None else f"{hardware:.0%}"
    yield "speed", f"{row.tflops:.4g} TFLOP/s, {share}; including recomputation {with_recompute}"
    if row.peak_gib is not None:
        estimate = "no estimate" if row.estimated_peak_gib is None else f"estimated {row.estimated_peak_gib:.1f}"
        yield "peak", f"{row.peak_gib:.1f} GiB, {estimate}"
    if row.joules_per_step is not None:
        watts = f"{1000 * row.joules_per_step / row.ms_per_step:.0f} W"
        clock = "" if row.clock_mhz is None else f", {row.clock_mhz:,} MHz"
        theirs = row.baseline_joules_per_step
        beside = "" if theirs is None else f"; baseline {theirs:.0f} J"
        yield "energy", f"{row.joules_per_step:.1f} J per step, {watts}{clock}{beside}"
    yield "first step", f"{row.compile_s:.1f} s longer, mostly compilation"
    if row.baseline_ms is not None and row.ratio is not None:
        yield "baseline", f"{row.baseline_ms:.1f} ms: {row.baseline}; ours is {row.ratio:.2f}x as fast"
    if row.unrouted_ms is not None:
        ratio = row.unrouted_ms / row.ms_per_step
        yield "routing", f"{row.token_routing:.0%} of the tokens skip blocks; {ratio:.2f}x as fast as with all"
    if row.numerics is not None:
        numbers = row.numerics
        yield (
            "gradients",
            f"{numbers['relative_error']:.2e} off fp32, cosine {numbers['cosine']:.6f}; "
            f"the libraries' layers {numbers['library_relative_error']:.2e}",
        )
