"""`gracetune`: the command and what every subcommand shares."""

from __future__ import annotations

import sys

import typer

from gracetune import __version__
from gracetune.cli.adapter import app as adapter_app
from gracetune.cli.baseline import app as baseline_app
from gracetune.cli.bench import app as bench_app
from gracetune.cli.bench_steps import add_step_benches
from gracetune.cli.cache import app as cache_app
from gracetune.cli.config import app as config_app
from gracetune.cli.console import Session, start
from gracetune.cli.data import app as data_app
from gracetune.cli.demo import demo
from gracetune.cli.doctor import doctor
from gracetune.cli.estimate import estimate
from gracetune.cli.examples import app as examples_app
from gracetune.cli.init import init
from gracetune.cli.overlay import app as overlay_app
from gracetune.cli.train import train, validate_now

app = typer.Typer(
    help="Fine-tune diffusion models on machines whose CPU and GPU memory work as one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(cache_app, name="cache")
app.add_typer(adapter_app, name="adapter")
app.add_typer(baseline_app, name="baseline")
app.add_typer(overlay_app, name="overlay")
app.add_typer(examples_app, name="examples")
add_step_benches(bench_app)
app.add_typer(bench_app, name="bench")
app.command()(init)
app.command()(train)
app.command("validate-now")(validate_now)
app.command()(doctor)
app.command()(demo)
app.command()(estimate)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code."""

    def run(session: Session) -> int:
        app(args=arguments, obj=session)
        return 0

    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(start(run, as_json="--json" in given))


if __name__ == "__main__":
    main()
