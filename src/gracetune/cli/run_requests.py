"""`gracetune validate-now`, `save-now` and `stop`: requests to a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gracetune.cli.streams import ignore_lost_stdout

_RunFolder = Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="The run's output folder.")]


def validate_now(run_folder: _RunFolder) -> None:
    """Request a validation from a running job. It generates the samples after its current step."""
    from gracetune.train.run_requests import REQUESTS, ask

    ignore_lost_stdout()
    print(ask(run_folder, REQUESTS["validate"]))


def save_now(run_folder: _RunFolder) -> None:
    """Request a checkpoint from a running job. It saves after its current step and goes on."""
    from gracetune.train.run_requests import REQUESTS, ask

    ignore_lost_stdout()
    print(ask(run_folder, REQUESTS["save"]))


def stop(run_folder: _RunFolder) -> None:
    """Stop a running job after its current step. It saves first; the same command resumes it."""
    from gracetune.train.run_requests import REQUESTS, ask

    ignore_lost_stdout()
    print(ask(run_folder, REQUESTS["stop"]))
