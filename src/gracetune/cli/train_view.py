"""The output of `gracetune train`: progress, and the result as text or JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from gracetune.cache.pass_worker import PassProgress as PassProgress
from gracetune.cli.console import mark, shown
from gracetune.cli.estimate_view import print_plan
from gracetune.config.run_config import RunConfig
from gracetune.data.staging.progress import OnProgress, StagingProgress
from gracetune.hardware import Machine
from gracetune.storage.transfer import OnFetched
from gracetune.telemetry.progress import RunStatus
from gracetune.train.first_batch import FirstBatch
from gracetune.train.output import RunFolder
from gracetune.train.planning import PlannedRun
from gracetune.train.run import Result
from gracetune.train.view import View
from gracetune.units import MIB, format_bytes, format_duration

_LINE_EVERY = 30.0
"""Seconds between lines about a download, if there is no progress bar."""


class QuietView(View):
    """The view for --json and for ranks above 0. The first rank prints warnings on stderr; nothing else is printed."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self._first = first

    def warn(self, text: str) -> None:
        super().warn(text)
        if self._first:
            print(f"warning: {text}", file=sys.stderr)

    def __enter__(self) -> QuietView:
        return self

    def __exit__(self, *_: object) -> None: ...


def bars(console: Console) -> Progress:
    """A progress bar. A narrow terminal cuts off the text at its end, never the counts."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(1, (console.width - 60) // 4), table_column=Column(no_wrap=True)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _More(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class _More(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["more"], no_wrap=True, overflow="ellipsis")


class TerminalView(View):
    """The view for people: lines and one progress bar on stderr. If stderr is not a terminal, lines only."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = bars(self._console)
        self._tasks: dict[str, TaskID] = {}

    def report(self, text: str) -> None:
        self._console.print(shown(text))

    def warn(self, text: str) -> None:
        super().warn(text)
        self._console.print(f"[yellow]warning[/] {shown(text)}")

    def planned(self, planned: PlannedRun, machine: Machine) -> None:
        if planned.not_ours is not None:
            self.report(planned.not_ours)
            return
        print_plan(planned.demand, planned.plan, machine, planned.demand.assumptions, self._console)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._console.print(f"[bold]{shown(name)}[/]")
        yield
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()

    def on_scanned(self, name: str, done: int, total: int) -> None:
        self._bar(f"looking at {name}", done, total)

    def on_download(self, name: str) -> OnFetched:
        began = last_line = time.monotonic()
        resumed_at: int | None = None  # bytes that an earlier, interrupted download left; they do not count as pace

        def show(done: int, total: int) -> None:
            nonlocal last_line, resumed_at
            resumed_at = done if resumed_at is None else resumed_at
            pace = (done - resumed_at) / max(1e-3, time.monotonic() - began)
            left = format_duration((total - done) / pace) if pace > 0 else "unknown"
            more = f"{format_bytes(done)} of {format_bytes(total)}, {format_bytes(int(pace))}/s, {left} left"
            self._bar(f"downloading {name}", done // MIB, -(-total // MIB), more)
            if self._progress.disable and time.monotonic() - last_line > _LINE_EVERY:
                last_line = time.monotonic()
                self.report(f"downloading {name}: {more}")

        return show

    def on_staging(self, name: str) -> OnProgress:
        def show(progress: StagingProgress) -> None:
            self._bar(f"staging {name}", progress.files, progress.files_total, str(progress))

        return show

    def on_text(self, progress: PassProgress) -> None:
        self._pass("encoding captions", progress)

    def on_latents(self, progress: PassProgress) -> None:
        self._pass("encoding latents", progress)

    def _pass(self, what: str, progress: PassProgress) -> None:
        left = "" if progress.seconds_left is None else f"{format_duration(progress.seconds_left)} left"
        self._bar(what, progress.done, progress.total, left)

    def on_step(self, step: int, steps: int) -> None:
        task = self._tasks.get("training")
        if task is None:
            self._tasks["training"] = self._progress.add_task("training", total=steps, completed=step, more="")
        else:
            self._progress.update(task, completed=step)

    def on_status(self, status: RunStatus) -> None:
        line = status.line()
        if self._progress.disable:
            self._console.print(shown(line))
        elif "training" in self._tasks:
            self._progress.update(self._tasks["training"], more=line.partition(" · ")[2])

    def _bar(self, what: str, done: int, total: int, more: str = "") -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, more=more)
        self._progress.update(self._tasks[what], completed=done, total=total, more=more)

    def __enter__(self) -> TerminalView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


# -- the result -------------------------------------------------------------------------------------------------------


def as_json(result: Result, config: RunConfig, price: float | None) -> dict[str, Any]:
    planned = result.planned
    value: dict[str, Any] = {
        "outcome": "dry run" if result.stop is None else result.stop.kind,
        "reason": "" if result.stop is None else result.stop.reason,
        "run": config.name,
        "folder": str(RunFolder.of(config).path),
        "step": result.step,
        "steps": result.steps,
        "files": [str(path) for path in result.files],
        "plan": {
            "verdict": planned.plan.verdict,
            "summary": planned.plan.summary,
            "applies": planned.not_ours is None,
            "note": planned.not_ours,
        },
        "first_batch": None if result.first_batch is None else asdict(result.first_batch),
        "notes": list(result.notes),
    }
    if result.stop is None:
        value["estimate"] = {
            "seconds_per_step": result.seconds_per_step,
            "hours": result.hours,
            "cost": None if price is None else result.hours * price,
        }
    return value


def print_result(console: Console, result: Result, config: RunConfig, price: float | None) -> None:
    if result.stop is None and result.first_batch is not None:
        _print_dry_run(console, result, result.first_batch, price)
    if result.stop is None:
        return
    good = result.stop.kind == "finished"
    saved = ", and saved" if result.step else ", with nothing to save"
    outcomes = {"finished": "finished", "interrupted": f"interrupted{saved}", "failed": f"stopped{saved}"}
    end = f"of {result.steps}" if result.step <= result.steps else f"already, past the configured {result.steps}"
    console.print(f"{mark(console, ok=good)} [bold]{outcomes[result.stop.kind]}[/] at step {result.step} {end}")
    if result.first_batch is None:
        console.print(f"    {shown(result.stop.reason)}")
    if not good:
        console.print(f"    {shown(result.stop.reason)}")
        if result.step:
            console.print("    run the same command again to resume from here")
    for path in result.files:
        console.print(f"    {shown(str(path))}")


def _print_dry_run(console: Console, result: Result, first_batch: FirstBatch, price: float | None) -> None:
    peak = "" if first_batch.peak_bytes is None else f", peak {format_bytes(first_batch.peak_bytes)}"
    console.print(f"one batch of {first_batch.samples}: {first_batch.seconds:.3g} s forward and backward{peak}")
    console.print(
        f"{result.seconds_per_step:.3g} s/it x {result.steps - result.step} steps = {result.hours:.3g} hours "
        "(without caching, validation and checkpoints)"
    )
    if price is not None:
        console.print(f"at {price:g} an hour: {result.hours * price:.2f}")
