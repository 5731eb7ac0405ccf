"""`gracetune demo`: a complete run on a tiny model and generated images, with a check of its results."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gracetune.cli.config import check_file, print_checked
from gracetune.cli.console import mark, out, session, shown
from gracetune.cli.doctor import DoctorOptions, run_doctor
from gracetune.cli.examples import INDEX, checkout
from gracetune.cli.library_output import libraries_quiet
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.config import Environment
from gracetune.errors import ConfigError, Problem


def demo(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the runs; unset: a temporary folder.")
    ] = None,
    wan: Annotated[
        bool, typer.Option("--wan", help="Train a tiny Wan 2.2 with two experts instead, stop it and resume it.")
    ] = False,
) -> None:
    """Examine this machine, check the examples, and teach a tiny model a new shape."""
    ignore_lost_stdout()
    console = out()
    environment = session(context).environment
    folder = _folder(output)
    console.rule("this machine")
    # Only a failed check changes the demo's exit code, and only at the end: a warning does not stop the demo.
    machine_code = run_doctor(DoctorOptions(skip_allocation=True), environment)
    console.rule("examples")
    examples_ok = _check_examples(console, checkout() / "examples", environment)
    console.rule("training")
    training_ok = (_train_experts if wan else _teach_star)(console, folder)
    raise typer.Exit(0 if examples_ok and training_ok and machine_code == 0 else 1)


def _teach_star(console: Console, folder: Path) -> bool:
    console.print(f"a tiny SDXL that knows circles, squares and triangles learns stars, in {shown(str(folder))}")
    with contextlib.redirect_stdout(sys.stderr), libraries_quiet():  # libraries print to stdout
        from gracetune.cli.train_view import TerminalView
        from gracetune.train.demo import demonstrate
        from gracetune.train.demo_shapes import CONCEPT

        with TerminalView() as view:
            done = demonstrate(folder, view)
    taught, control, known = done.taught, done.control, done.known
    checks = (
        (
            done.learned,
            f"with the adapter, {taught.stars} of {len(taught)} images show a {CONCEPT}, "
            f"{taught.right_colors} the colours of their captions",
        ),
        (done.control_holds, f"without it (same captions, same seeds), {control.stars} of {len(control)} do"),
        (
            done.keeps_the_rest,
            f"captions without the word {CONCEPT}: {known.right_shapes} of {len(known)} show their shape",
        ),
    )
    for ok, text in checks:
        console.print(f"{mark(console, ok=ok)} {text}")
    for name, path in (
        ("samples", done.grid),
        ("adapter", done.file),
        ("report", done.report),
        ("config", done.config),
    ):
        console.print(f"  {name:<8} {shown(str(path))}")
    return done.ok


def _train_experts(console: Console, folder: Path) -> bool:
    def show(text: str) -> None:
        console.print(f"  {shown(text)}")

    console.print(f"a tiny Wan 2.2 with two experts, a LoKr each, in {shown(str(folder))}")
    with contextlib.redirect_stdout(sys.stderr):  # libraries print to stdout while they are imported
        from gracetune.train.demo_wan import FALL, demonstrate_experts
    with libraries_quiet():
        done = demonstrate_experts(folder, show)
    least = min(one.fall for one in done.learned)
    console.print(
        f"{mark(console, ok=least >= FALL)} held-out loss fell by {least:.0%} or more for every seed and expert"
    )
    console.print(f"{mark(console, ok=done.ok)} the control did not learn, and diffusers reproduces what was learned")
    for path in (*done.files, done.report):
        console.print(f"  {shown(str(path))}")
    return done.ok


def _folder(output: Path | None) -> Path:
    if output is None:
        return Path(tempfile.mkdtemp(prefix="gracetune-demo-"))
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError([Problem("--output", f"{output}, which is there", "a new folder", "another --output")])
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem("--output", f"{output}: {error.strerror}", "a folder that can be made and written to",
                          "choose another one with --output")  # fmt: skip
        raise ConfigError([problem]) from error
    return output.absolute()


def _check_examples(console: Console, folder: Path, environment: Environment) -> bool:
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in (".json", ".yaml", ".toml") and path.name != INDEX
    )
    checked = [check_file(path, environment, paths=False) for path in files]
    for path, item in zip(files, checked, strict=True):
        notes = f" (notes: {len(item.notes)})" if item.notes else ""
        if not item.problems:  # only the number of notes: `gracetune config check` prints them
            console.print(f"{mark(console, ok=True)} {shown(path.name)}{notes}")
    print_checked(console, [item for item in checked if item.problems])
    return bool(checked) and not any(item.problems for item in checked)
