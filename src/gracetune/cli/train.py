"""`gracetune train`: a run from its config to the trained weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gracetune.cli.config import AllowUnsupported, AsJson, Overrides
from gracetune.cli.console import Session, out, print_json, session, spinner
from gracetune.cli.library_output import libraries_quiet
from gracetune.cli.log_level import LogLevel, logging_at
from gracetune.config import Resolved
from gracetune.config.machine_checks import named_path_problems
from gracetune.config.path_status import inspect_path
from gracetune.errors import ConfigError, Problem, visible
from gracetune.memory.reclaim import rare_collections
from gracetune.redaction import redact
from gracetune.train.control import Control, InterruptedBySignal, listening

if TYPE_CHECKING:  # torch and the models' code are loaded by the command that needs them, not by every `--help`
    from gracetune.train.run import Result

DONE, WRONG, INTERRUPTED = 0, 1, 3


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of the command line."""

    config: Path
    overrides: Sequence[str] = ()
    resume: str | None = None
    dry_run: bool = False
    allow_unsupported: bool = False
    allow_other_data: bool = False
    allow_other_run: bool = False
    allow_misfit: bool = False
    force_oversubscription: bool = False
    price_per_hour: float | None = None
    log_level: LogLevel = LogLevel.WARNING
    json: bool = False


def train(
    context: typer.Context,
    config_file: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="CONFIG",
            help="A configuration file of any dialect, or a folder of images, clips or sounds.",
        ),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="FROM", help="Resume from: latest, none or a checkpoint's path; unset: as in the config."),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N optimizer steps.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan, build the caches, run one batch and estimate the time.")
    ] = False,
    price_per_hour: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0, help="With --dry-run: price of an hour, to estimate the cost."),
    ] = None,
    no_samples: Annotated[
        bool,
        typer.Option("--no-samples", help="Generate no samples. Without prompts, captions of the dataset are used."),
    ] = False,
    allow_unsupported: AllowUnsupported = False,
    allow_other_data: Annotated[
        bool, typer.Option("--allow-other-data", help="Resume although the data has changed.")
    ] = False,
    allow_other_run: Annotated[
        bool, typer.Option("--allow-other-run", help="Resume from a checkpoint of another run.")
    ] = False,
    allow_misfit: Annotated[
        bool, typer.Option("--allow-misfit", help="Start although the memory plan says that it does not fit.")
    ] = False,
    log_level: Annotated[
        LogLevel,
        typer.Option(metavar="LEVEL", help="Print log lines from this level on to stderr: debug, info or warning."),
    ] = LogLevel.WARNING,
    force_oversubscription: Annotated[
        bool,
        typer.Option(
            "--force-oversubscription",
            help="With memory.use_uvm: let managed memory exceed 4 GiB without a coherent link to the CPU. DANGER: "
            "over PCIe, this can hang the driver until the machine is rebooted.",
        ),
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Train: stage data, build caches, train, validate, save. Exit code 3: interrupted, with its state saved."""
    if inspect_path(config_file).kind == "folder" and not json_output:
        config_file = _config_for(config_file, session(context))
    request = TrainRequest(
        config_file,
        (*(overrides or ()), *steps_override(max_steps), *samples_override(no_samples=no_samples)),
        resume,
        dry_run=dry_run,
        allow_unsupported=allow_unsupported,
        allow_other_data=allow_other_data,
        allow_other_run=allow_other_run,
        allow_misfit=allow_misfit,
        force_oversubscription=force_oversubscription,
        price_per_hour=price_per_hour,
        log_level=log_level,
        json=json_output,
    )
    raise typer.Exit(run_training(request, session(context)))


def _config_for(folder: Path, started: Session) -> Path:
    """On a terminal, offer to write a config for a folder of images. Elsewhere, and for an empty folder, loading it
    fails with a hint."""
    resolved = inspect_path(folder).path
    if (resolved / "config.yaml").is_file() or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return folder
    from gracetune.cli.init import InitRequest, default_output, run_init
    from gracetune.proposal.contents import holds_media

    beside = default_output(resolved)
    if inspect_path(beside).kind == "file":
        if typer.confirm(f"{folder} is a folder. Train with {beside}?", default=True, err=True):
            return beside
    elif not holds_media(resolved):
        return folder
    elif typer.confirm(f"{folder} is a folder. Write a config for it and train?", default=True, err=True):
        return run_init(InitRequest(folder), started).path
    raise typer.Exit(1)


def steps_override(max_steps: int | None) -> list[str]:
    """Overrides that set the number of steps and unset the number of epochs."""
    return [] if max_steps is None else [f"training.max_steps={max_steps}", "training.epochs=null"]


def samples_override(*, no_samples: bool) -> list[str]:
    return ["validation.enabled=false"] if no_samples else []


def _has_no_prompts(resolved: Resolved) -> bool:
    """Whether a file of our own dialect leaves `validation.prompts` out. An empty list asks for no samples."""
    given = (path for path, origin in resolved.origins.items() if origin.kind != "default")
    return resolved.dialect == "native" and not any(path[:2] == ("validation", "prompts") for path in given)


def run_training(request: TrainRequest, started: Session) -> int:
    """Run the training. Returns the exit code; raises GracetuneError."""
    try:
        with listening(Control(stops_on_sigusr1=started.environment.stops_on_sigusr1)) as control:
            return _train(request, started, control)
    except KeyboardInterrupt as interrupt:
        what = f"interrupted by {interrupt}" if isinstance(interrupt, InterruptedBySignal) else "interrupted"
        print(f"{what}; staged data is lost, caches and checkpoints stay", file=sys.stderr)
        return INTERRUPTED


def _train(request: TrainRequest, started: Session, control: Control) -> int:
    _check_resume(request.resume)
    environment = started.environment
    resolved = started.load(request.config, request.overrides, allow_unsupported=request.allow_unsupported)
    first = (environment.get("RANK") or "0") == "0"
    view: TerminalView | QuietView | None = None
    early: list[str] = []

    def report_lost(text: str) -> None:
        """Record what was lost of the console; keep it until there is a view."""
        if view is None:
            early.append(text)
        else:
            view.record(text)

    started.streams.serve_a_run(report_lost)  # before the first line: a reader that reads nothing must not block it
    shows = first and not request.json
    if shows:
        config = resolved.config
        what = f"{request.config}: {config.model.family}, {config.adapter.kind}, into {config.output_dir}"
        print(visible(redact(what)), file=sys.stderr)
    # Libraries print to stdout, which is reserved for results.
    level = request.log_level if first else LogLevel.WARNING  # only the first process prints log lines
    with contextlib.redirect_stdout(sys.stderr), libraries_quiet(), logging_at(level):
        # Importing torch and diffusers takes seconds and creates half a million objects; collecting them is slow.
        with rare_collections(), spinner("loading PyTorch and diffusers", visible=shows):
            from gracetune import gh200
            from gracetune.cli.train_view import QuietView, TerminalView
            from gracetune.train.preparation import PreparationTimes
            from gracetune.train.run import RunOptions
            from gracetune.train.run import train as run

        options = RunOptions(
            request.resume,
            dry_run=request.dry_run,
            allow_other_data=request.allow_other_data,
            allow_other_run=request.allow_other_run,
            allow_misfit=request.allow_misfit,
            force_oversubscription=request.force_oversubscription,
            default_samples=_has_no_prompts(resolved),
        )
        view = TerminalView() if shows else QuietView(is_rank_0=first)
        for text in early:
            view.record(text)
        for note in resolved.notes:
            view.warn(note)
        with view, libraries_quiet(view.warn):
            result = run(
                resolved.config, environment=environment, options=options, view=view, control=control,
                on_memory=gh200.attach, known=_missing_paths(resolved), preparation=PreparationTimes.of_this_process(),
            )  # fmt: skip
    if first:
        _show(result, request, resolved, started)
    return _exit_code(result)


def _check_resume(resume: str | None) -> None:
    """Reject an empty --resume: it usually comes from an unset shell variable, and must not start a new run."""
    if resume is not None and not resume.strip():
        hint = "name one; without --resume it is as the config says; an unset shell variable may be the cause"
        raise ConfigError([Problem("--resume", "nothing", "latest, none or the path of a checkpoint", hint)])


def _exit_code(result: Result) -> int:
    if result.stop is None:
        return DONE
    return {"finished": DONE, "interrupted": INTERRUPTED, "failed": WRONG}[result.stop.kind]


def _show(result: Result, request: TrainRequest, resolved: Resolved, started: Session) -> None:
    """Print the result. The run is saved by now, so a failing stdout does not change its exit code."""
    from gracetune.cli.train_view import as_json, print_result

    if request.json:
        print_json(as_json(result, resolved.config, request.price_per_hour))
    else:
        print_result(out(), result, resolved.config, request.price_per_hour)
    stdout = started.streams.stdout
    if stdout is not None and stdout.lost is not None:
        print(f"warning: {stdout.what_is_lost}; the run is not affected", file=sys.stderr)


def _missing_paths(resolved: Resolved) -> list[tuple[str, Problem]]:
    """Missing paths, for the list of all problems. Their hints lose --no-paths, which only `config check` has."""
    ending = "; or check without folders: --no-paths"
    return [
        (key, replace(problem, hint=problem.hint.removesuffix(ending)))
        for key, problem in named_path_problems(resolved)
    ]
