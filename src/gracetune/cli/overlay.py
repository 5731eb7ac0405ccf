"""`gracetune overlay check | run`: check that an upstream program still has the code we attach to, and start it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AsJson
from gracetune.cli.console import mark, out, print_json, session, shown
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.data.text_format import counted
from gracetune.integrations.check import Finding, Status, UpstreamReport
from gracetune.integrations.check import check as check_points
from gracetune.integrations.facts import FactsError, read_facts
from gracetune.integrations.points import Upstream
from gracetune.integrations.survey import survey
from gracetune.integrations.trees import open_tree
from gracetune.integrations.upstreams import UPSTREAMS

app = typer.Typer(
    cls=CommandGroup,
    help="Run SimpleTuner or ai-toolkit with features of gracetune.",
    no_args_is_help=True,
    add_completion=False,
)


class OverlayName(StrEnum):
    SIMPLETUNER = "simpletuner"
    AI_TOOLKIT = "ai-toolkit"


UpstreamName = Annotated[OverlayName, typer.Argument(metavar="UPSTREAM", help="simpletuner or ai-toolkit.")]


@app.callback()
def overlay() -> None:
    """Run SimpleTuner or ai-toolkit with features of gracetune."""


@app.command()
def check(
    upstream: UpstreamName,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Code to check: a checkout, a site-packages folder, an environment, a wheel or recorded facts; "
            "unset: the installed package.",
        ),
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Find every point of upstream's code that we attach to, without importing it. Exit 1 if a needed one is lost."""
    report = _report(UPSTREAMS[upstream], source)
    if json_output:
        print_json(report.as_json())
    else:
        _print(out(), report, UPSTREAMS[upstream])
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def run(
    context: typer.Context,
    upstream: UpstreamName,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments for upstream itself.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Start plain upstream, without our features.")] = False,
) -> None:
    """Start upstream with our features, or without them with --off. Exits with upstream's exit code."""
    from gracetune.integrations.launch import run_upstream

    ignore_lost_stdout()
    raise typer.Exit(run_upstream(upstream, arguments or [], off=off, environment=session(context).environment))


# -- parts ------------------------------------------------------------------------------------------------------------


def _report(upstream: Upstream, source: Path | None) -> UpstreamReport:
    if source is not None and source.suffix == ".json":
        facts = read_facts(source)
        if facts.upstream != upstream.name:
            raise FactsError(f"{source}: facts of {facts.upstream}, not of {upstream.name}")
    else:
        with open_tree(upstream, source) as (tree, origin):
            facts = survey(tree, upstream, origin)
    return check_points(facts, upstream.points)


def _print(console: Console, report: UpstreamReport, upstream: Upstream) -> None:
    console.print(
        f"[bold]{upstream.title}[/] {shown(report.version or 'of unknown version')} in {shown(report.origin)}"
    )
    width = max(len(one.point.name) for one in report.findings)
    for one in report.findings:
        _print_finding(console, one, width)
    for file, reason in report.unreadable:
        console.print(f"not valid Python, skipped: {shown(file)}: {shown(reason)}")
    console.print(_verdict(report))


def _print_finding(console: Console, one: Finding, width: int) -> None:
    location = "" if one.file is None else one.file if one.line is None else f"{one.file}:{one.line}"
    is_usable = one.status is Status.PRESENT or (one.status is Status.MOVED and one.reachable)
    needed = "" if one.point.needed else " (not needed)"
    status = "" if one.status is Status.PRESENT else f"[bold]{one.status}[/]{needed} "
    sign = mark(console, ok=is_usable) if is_usable or one.breaks else "-"
    console.print(f"{sign} {one.point.name:{width}}  {status}{shown(location)}")
    if one.status is not Status.PRESENT:
        console.print(f"    for       {shown(one.point.needed_for)}")
        console.print(f"    expected  {shown(one.point.location)}")
        console.print(f"    found     {shown(one.detail)}")


def _verdict(report: UpstreamReport) -> str:
    broken = sum(one.breaks for one in report.findings)
    counts = ", ".join(f"{report.count(status)} {status}" for status in Status if report.count(status))
    if broken:
        lost = f"{counted(broken, 'needed point')} gone, changed or out of reach"
        return f"{counts}: {lost}, so the overlay does not fit this version"
    return f"{counts}: everything needed is there"
