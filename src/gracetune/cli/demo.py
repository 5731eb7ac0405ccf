"""`gracetune demo`: what this machine is, whether the shipped examples are sound, and what one of them would do."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from gracetune.cli.config import check_file, print_checked
from gracetune.cli.console import out, session
from gracetune.cli.doctor import DoctorOptions, run_doctor
from gracetune.cli.estimate import demand_of
from gracetune.cli.estimate_view import print_plan
from gracetune.cli.summary import print_summary
from gracetune.config import Environment, RunConfig, load
from gracetune.errors import MachineError
from gracetune.hardware import probe
from gracetune.memory.planning.plan import plan

SHOWN = "wan22_dual_expert_lokr.yaml"
"""The job most of our users come with."""


def demo(context: typer.Context) -> None:
    """Show what is here: this machine's report, the shipped examples, and what one of them would do."""
    console = out()
    environment = session(context).environment
    examples = find_examples()
    console.rule("this machine")
    # What the demo needs of the machine is only that it can be examined; a warning there must not end the demo.
    machine_code = run_doctor(DoctorOptions(skip_allocation=True), environment)
    console.rule("examples")
    sound = _check_examples(console, examples, environment)
    console.rule(f"examples/{SHOWN}")
    resolved = load(examples / SHOWN, environment=environment.without_memory_options())
    print_summary(console, resolved)
    console.print()
    _print_plan(console, resolved.config)
    raise typer.Exit(0 if sound and machine_code == 0 else 1)


def _print_plan(console: Console, config: RunConfig) -> None:
    """The plan of the example on this machine. That a laptop cannot hold it is a finding, not a failure."""
    machine = probe()
    demand, assumption = demand_of(config, machine, None)
    assumptions = (*((assumption,) if assumption else ()), *demand.assumptions)
    print_plan(demand, plan(demand, machine, disk_free=None), machine, assumptions, console)


def find_examples() -> Path:
    """The examples of this clone; an installed wheel does not carry them."""
    folder = Path(__file__).parents[3] / "examples"
    if not folder.is_dir():
        raise MachineError(
            f"no examples at {folder}: the demo runs from a clone of the repository; clone it and `make demo`"
        )
    return folder


def _check_examples(console: Console, folder: Path, environment: Environment) -> bool:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in (".json", ".yaml", ".toml"))
    checked = [check_file(path, environment, paths=False) for path in files]
    print_checked(console, checked)
    return bool(checked) and not any(item.problems for item in checked)
