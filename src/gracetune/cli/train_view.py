"""The output of `gracetune train`: progress, and the result as text or JSON."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from gracetune.adapters.formats.record import FORMATS
from gracetune.cache.pass_worker import PassProgress as PassProgress
from gracetune.cli.console import mark, shown
from gracetune.cli.estimate_view import print_plan
from gracetune.config.run_config import RunConfig
from gracetune.data.staging.report import OnProgress, StagingProgress
from gracetune.errors import visible
from gracetune.hardware import Machine
from gracetune.redaction import redact
from gracetune.storage.transfer import OnFetched
from gracetune.telemetry.progress import SEPARATOR, RunStatus
from gracetune.train.first_batch import FirstBatch
from gracetune.train.output import RunFolder
from gracetune.train.planning import PlannedRun
from gracetune.train.run import Result
from gracetune.train.view import View
from gracetune.units import MIB, format_bytes, format_duration

_LINE_SECONDS = 30.0
"""Seconds between lines about a download or the training, if there is no progress bar."""
_TRAINING = "training"
_NARROW = 90
"""Columns of a terminal that has no room for the bar beside the numbers."""


class QuietView(View):
    """The view for --json and for ranks above 0. Only rank 0 prints, and only warnings, on stderr."""

    def __init__(self, *, is_rank_0: bool) -> None:
        super().__init__()
        self._is_rank_0 = is_rank_0

    def warn(self, text: str) -> None:
        super().warn(text)
        if self._is_rank_0:
            print(f"warning: {text}", file=sys.stderr)

    def __enter__(self) -> QuietView:
        return self

    def __exit__(self, *_: object) -> None: ...


def create_progress(console: Console) -> Progress:
    """Progress bars and spinners. A narrow terminal omits the last parts of a line, never the counts."""
    room = (console.width - _NARROW) // 3
    return Progress(
        SpinnerColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", markup=False),
        *([_Bar(bar_width=room, table_column=Column(no_wrap=True))] if room > 0 else []),
        _Count(table_column=Column(no_wrap=True)),
        _More(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class _Bar(BarColumn):
    def render(self, task: Task) -> ProgressBar | Text:  # type: ignore[override]
        return Text() if task.total is None else super().render(task)


class _Count(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _More(ProgressColumn):
    def render(self, task: Task) -> _TruncatedParts:
        if task.total is None:  # a spinner
            elapsed = task.elapsed or 0.0
            return _TruncatedParts(f"{elapsed:.0f} s" if elapsed >= 1 else "")
        return _TruncatedParts(task.fields["more"])


@dataclass(frozen=True)
class _TruncatedParts:
    """Text of parts, of which as many are shown as there is room for."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(1, len(self.text)), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown_parts, *others = self.text.split(SEPARATOR)
        for part in others:
            if len(shown_parts) + len(SEPARATOR) + len(part) > options.max_width:
                break
            shown_parts += SEPARATOR + part
        yield Text(shown_parts, no_wrap=True, overflow="ellipsis")


class TerminalView(View):
    """The interactive view, on stderr. A terminal shows bars, spinners and permanent lines; otherwise only lines are
    printed."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = create_progress(self._console)
        self._tasks: dict[str, TaskID] = {}
        self._spinners: list[TaskID] = []
        """The spinners of `waiting` and `phase`, the innermost last. Only that one is shown, and only without a bar."""
        self._last_line = -_LINE_SECONDS

    def report(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        super().warn(text)
        self._print(f"warning {text}", yellow=len("warning"))

    def _print(self, text: str, *, style: str = "", yellow: int = 0) -> None:
        """Print a text line by line: an error has several. On a terminal, lines are wrapped between words."""
        lines = [visible(line) for line in redact(text).split("\n")]
        if self._console.is_terminal:
            lines = [part for line in lines for part in self._wrapped(line)]
        line = Text("\n".join(lines), style)
        line.stylize("yellow", 0, yellow)
        self._console.print(line)

    def _wrapped(self, line: str) -> list[str]:
        width = self._console.width
        return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [
            ""
        ]

    def planned(self, planned: PlannedRun, machine: Machine) -> None:
        if planned.mismatch is not None:
            self.report(planned.mismatch)
            return
        print_plan(planned.demand, planned.plan, machine, planned.demand.assumptions, self._console)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._print(name, style="bold")
        with self.waiting(name):
            yield

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        before = {*self._tasks}
        self._spinners.append(self._progress.add_task(what, total=None, more=""))
        self._show_spinner()
        try:
            yield
        finally:
            for name in [name for name in self._tasks if name not in before]:
                self._progress.remove_task(self._tasks.pop(name))
            self._progress.remove_task(self._spinners.pop())
            self._show_spinner()

    def _show_spinner(self) -> None:
        """Show the innermost spinner, unless a bar shows what is going on."""
        busy = bool({*self._tasks} - {_TRAINING}) or (_TRAINING in self._tasks and len(self._spinners) == 1)
        for number, task in enumerate(self._spinners, start=1):
            self._progress.update(task, visible=number == len(self._spinners) and not busy)

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
            if self._progress.disable and time.monotonic() - last_line > _LINE_SECONDS:
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

    def on_sample(self, step: int, done: int, total: int) -> None:
        self._bar(f"samples at step {step}", done, total)

    def on_step(self, step: int, steps: int) -> None:
        if _TRAINING in self._tasks:
            self._progress.update(self._tasks[_TRAINING], completed=step)
        else:
            self._tasks[_TRAINING] = self._progress.add_task(_TRAINING, total=steps, completed=step, more="")
            self._show_spinner()

    def on_status(self, status: RunStatus) -> None:
        if not self._progress.disable:
            self._refresh(status)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self.on_summary(status)

    def on_summary(self, status: RunStatus) -> None:
        self._last_line = time.monotonic()
        self._print(status.line())
        if not self._progress.disable:
            self._refresh(status)

    def _refresh(self, status: RunStatus) -> None:
        if status.total_steps is not None:
            self.on_step(status.step, status.total_steps)
            self._progress.update(self._tasks[_TRAINING], more=SEPARATOR.join(status.parts()))

    def _bar(self, what: str, done: int, total: int, more: str = "") -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, more=more)
            self._show_spinner()
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
            "applies": planned.mismatch is None,
            "note": planned.mismatch,
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
    saved = " and saved" if result.step else ", with nothing to save"
    outcomes = {"finished": "finished", "interrupted": f"interrupted{saved}", "failed": f"stopped{saved}"}
    end = f" of {result.steps}" if result.step <= result.steps else f", beyond the configured {result.steps}"
    console.print(f"{mark(console, ok=good)} [bold]{outcomes[result.stop.kind]}[/] at step {result.step}{end}")
    if result.first_batch is None or not good:
        for line in result.stop.reason.split("\n"):
            console.print(f"    {shown(line)}")
    if not good and result.step:
        console.print("    run the same command again to resume from here")
    for path in result.files:
        console.print(f"    {shown(str(path))}")
    if result.files and _is_for_comfyui(config):
        console.print("    copy to ComfyUI/models/loras")


def _is_for_comfyui(config: RunConfig) -> bool:
    """Whether the run's files are adapters that ComfyUI loads as they were trained. Preflight has checked the format's
    programs, or the one that the config names."""
    if config.adapter.is_full_finetune:
        return False
    saved = config.checkpoints
    made_for = FORMATS[saved.format].made_for if saved.for_program is None else (saved.for_program,)
    return "comfyui" in made_for


def _print_dry_run(console: Console, result: Result, first_batch: FirstBatch, price: float | None) -> None:
    peak = "" if first_batch.peak_bytes is None else f", peak {format_bytes(first_batch.peak_bytes)}"
    console.print(f"one batch of {first_batch.samples}: {first_batch.seconds:.3g} s forward and backward{peak}")
    console.print(
        f"{result.seconds_per_step:.3g} s/it x {result.steps - result.step} steps = {result.hours:.3g} hours "
        "(without caching, validation and checkpoints)"
    )
    if price is not None:
        console.print(f"at {price:g} an hour: {result.hours * price:.2f}")
