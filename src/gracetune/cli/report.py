"""`gracetune report`: write the report of a run again, at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gracetune.cli.config import AsJson
from gracetune.cli.console import out, print_json, shown


def report(
    run_folder: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="The run's output folder.")],
    as_json: AsJson = False,
) -> None:
    """Write the report of a run: finished, still running, or crashed.

    The pages report.html (samples, how to load the result, losses, speed, memory) and report.json (the same as data)
    in the run's folder are replaced. A run writes them itself when it ends.
    """
    from gracetune.adapters.loading_steps import loading_steps
    from gracetune.telemetry.report import write_report
    from gracetune.train.run_requests import is_running

    folder = run_folder.expanduser().absolute()
    written = write_report(folder, loading_steps, running=is_running(folder))
    if as_json:
        print_json({"html": str(written.html), "json": str(written.json)})
    else:
        out().print(f"report: {shown(str(written.html))}")
