"""`gracetune family check`: the checklist of a model family, on its tiny model."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AsJson
from gracetune.cli.console import mark, out, print_json, spinner
from gracetune.cli.library_output import libraries_quiet
from gracetune.config.families import FAMILIES
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gracetune.testing.family_check.checklist import FamilyCheckResult

app = typer.Typer(
    cls=CommandGroup,
    help="Check a model family on its tiny model.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def family() -> None:
    """Check a model family on its tiny model."""


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A family of gracetune, or of an installed package.")],
    flavour: Annotated[
        str | None, typer.Option(metavar="FLAVOUR", help="Check this flavour instead of the first one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a model family on its tiny model. Needs no GPU and downloads nothing. Exit 1 on any failure."""
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError([Problem("NAME", name, supported, nearest(name, FAMILIES) or FAMILIES[0])])
    console = out()

    def show(result: FamilyCheckResult) -> None:
        if as_json:
            return
        state = "ok" if result.ok else "failed"
        console.print(f"{mark(console, ok=result.ok)} {result.name:<12} {state}: {escape(result.found)}")
        if not result.ok:
            console.print(f"    expected  {escape(result.expected)}\n    try       {escape(result.hint)}")

    with tempfile.TemporaryDirectory(prefix="gracetune-family-") as folder, libraries_quiet():
        with spinner(f"building a tiny {name}", visible=not as_json):
            from gracetune.testing.family_check.case import FamilyCase
            from gracetune.testing.family_check.checklist import run_checks

            case = FamilyCase.build(name, flavour, Path(folder))
        results = run_checks(case, show)
    ok = all(result.ok for result in results)
    if as_json:
        checks = [asdict(result) for result in results]
        print_json({"ok": ok, "family": name, "flavour": case.flavour.name, "checks": checks})
    raise typer.Exit(0 if ok else 1)
