"""`gracetune`: the command and what every subcommand shares."""

from __future__ import annotations

import sys

import typer

from gracetune import __version__
from gracetune.cli.bench import bench
from gracetune.cli.config import app as config_app
from gracetune.cli.console import Session, say_error
from gracetune.cli.demo import demo
from gracetune.cli.doctor import doctor
from gracetune.cli.estimate import estimate
from gracetune.config.environment import Environment, claim_allocator_options, torch_accepts_uvm_options
from gracetune.errors import GracetuneError

app = typer.Typer(
    help="Fine-tune diffusion models on machines whose CPU and GPU memory work as one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
app.command()(doctor)
app.command()(demo)
app.command()(bench)
app.command()(estimate)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run one command; every error of ours becomes a message on stderr and exit code 1."""
    session = Session(Environment.capture())
    # Before anything can import torch: a stock PyTorch stops at allocator options it does not know.
    for line in claim_allocator_options(torch_takes_them=torch_accepts_uvm_options()):
        print(line, file=sys.stderr)
    try:
        app(args=arguments, obj=session)
    except GracetuneError as error:
        say_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
