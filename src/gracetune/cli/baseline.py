"""`gracetune baseline capture | compare`: measure the cost of a config on this machine, and detect regressions."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gracetune.baselines.baseline import MOST_STEPS, read_baseline
from gracetune.bench.results import git_commit
from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AllowUnsupported, AsJson, Overrides
from gracetune.cli.console import mark, out, print_json, session, shown
from gracetune.cli.library_output import libraries_quiet
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.config.machine_checks import path_problems
from gracetune.errors import ConfigError

DEFAULT_STEPS = 60
DEFAULT_TOLERANCE = "5%"

app = typer.Typer(
    cls=CommandGroup,
    help="Measure what a config costs here, and compare it later.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def capture(
    context: typer.Context,
    config_file: Annotated[
        Path, typer.Argument(readable=False, metavar="CONFIG", help="A configuration file of any dialect.")
    ],
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=8, max=MOST_STEPS, help="Optimizer steps; the first quarter, at most 10, is warm-up."
        ),
    ] = DEFAULT_STEPS,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for baselines.")] = Path("baseline"),
    overrides: Overrides = None,
    use_caches: Annotated[
        bool, typer.Option("--use-caches", help="Use and fill the config's own caches instead of temporary ones.")
    ] = False,
    allow_unsupported: AllowUnsupported = False,
    allow_misfit: Annotated[
        bool, typer.Option("--allow-misfit", help="Start although the memory plan says that it does not fit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train for some steps in a separate folder and record their cost in baseline.json and baseline_report.txt."""
    ignore_lost_stdout()
    environment = session(context).environment
    resolved = session(context).load(config_file, overrides, allow_unsupported=allow_unsupported)
    problems = path_problems(resolved)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    # Libraries print to stdout, which is reserved for results.
    with contextlib.redirect_stdout(sys.stderr), libraries_quiet():
        from gracetune import gh200
        from gracetune.baselines.capture import CaptureOptions
        from gracetune.baselines.capture import capture as captured
        from gracetune.cli.train_view import QuietView, TerminalView

        options = CaptureOptions(
            steps,
            output.absolute(),
            use_caches=use_caches,
            allow_misfit=allow_misfit,
            command=" ".join(["gracetune", *sys.argv[1:]]),
            git_commit=git_commit(),
        )
        view = QuietView(is_rank_0=True) if as_json else TerminalView()
        for note in resolved.notes:
            view.warn(note)
        with view:
            done = captured(resolved.config, options, environment=environment, view=view, on_memory=gh200.attach)
    if as_json:
        print_json({"folder": str(done.folder), **json.loads(done.baseline.to_json())})
        return
    from gracetune.baselines.rendering import report

    print(report(done.baseline))
    out().print(f"{mark(out(), ok=True)} {shown(str(done.folder))}")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(readable=False, metavar="A", help="Folder of the earlier baseline.")],
    after: Annotated[Path, typer.Argument(readable=False, metavar="B", help="Folder of the baseline to judge.")],
    tolerance: Annotated[
        str, typer.Option(metavar="SHARE", help="Accept this much slower or larger: 5% or 0.05.")
    ] = DEFAULT_TOLERANCE,
    allow_other_config: Annotated[
        bool, typer.Option("--allow-other-config", help="Compare although the configurations differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two baselines. Exit 1 if B is slower or larger than A beyond the tolerance."""
    from gracetune.baselines.regression import compare as compared
    from gracetune.baselines.regression import parse_tolerance
    from gracetune.baselines.rendering import sentence, table

    allowed = parse_tolerance(tolerance)
    found = compared(read_baseline(before), read_baseline(after), allowed, allow_other_config=allow_other_config)
    if as_json:
        print_json({"a": str(before), "b": str(after), **found.as_json()})
    else:
        console = out()
        for line in table(found).splitlines():
            console.print(shown(line))
        for note in found.notes:
            console.print(f"note  {shown(note)}")
        proven = found.regressions or not found.unclear
        sign = f"{mark(console, ok=not found.regressions)} " if proven else ""
        console.print(f"{sign}{shown(sentence(found))}")
    raise typer.Exit(1 if found.regressions else 0)
