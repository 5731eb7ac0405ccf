"""`gracetune estimate`: the memory that a run needs, its placement, and whether it fits, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from gracetune.cache.residence import placement_lines
from gracetune.cli.config import AllowUnsupported, AsJson, Overrides
from gracetune.cli.console import out, print_json, session
from gracetune.cli.estimate_view import as_json, print_plan
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.data.copies.local import Copies
from gracetune.data.errors import DataError
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe
from gracetune.hardware.doctor import REPORT_FORMAT
from gracetune.hub.access import HubAccess
from gracetune.planning.config_demand import demand_of
from gracetune.planning.dataset_facts import DatasetFacts
from gracetune.planning.demand import Demand, Role
from gracetune.planning.memory_tiers import free_on_disk
from gracetune.planning.plan import plan
from gracetune.planning.processes import Processes

MOST_PROCESSES = 4096


def estimate(
    context: typer.Context,
    config_file: Annotated[
        Path, typer.Argument(readable=False, metavar="CONFIG", help="A configuration file of any dialect.")
    ],
    machine_file: Annotated[
        Path | None,
        typer.Option(
            "--machine",
            readable=False,
            metavar="FILE",
            help="Plan for the machine of this doctor report, not for this one.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Assume N samples in each dataset that is not on this machine."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_PROCESSES,
            help="Plan for N processes, one per GPU, on as many machines like this one as that takes.",
        ),
    ] = 1,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="With --processes: shard the weights over the processes (FSDP2).")
    ] = False,
    overrides: Overrides = None,
    allow_unsupported: AllowUnsupported = False,
    json_output: AsJson = False,
) -> None:
    """Plan the memory of a run before anything is loaded. Exit code 1 if it does not fit."""
    resolved = session(context).load(config_file, overrides, allow_unsupported=allow_unsupported)
    machine = probe() if machine_file is None else read_machine(machine_file)
    if fsdp and processes == 1:
        expected = "--processes N with N above 1: one process has nothing to share"
        raise ConfigError([Problem("--fsdp", "one process", expected, "--processes 2 --fsdp")])
    several = Processes.on(machine, processes, sharded=fsdp)
    remote = inspect_copies(resolved.config, session(context).environment, machine)
    cache = session(context).environment.cache_folder
    demand, assumption = demand_of(
        resolved.config, machine, samples, several, remote.facts, option="--samples", cache=cache
    )
    disk_free = free_on_disk(resolved.config.output_dir) if machine_file is None else None
    result = plan(demand, machine, disk_free=disk_free)
    result = replace(result, notes=(*result.notes, *_hints(resolved.config, machine, demand)))
    result = replace(result, notes=(*result.notes, *remote.lines))
    if remote.rejected is not None and machine_file is None:
        result = replace(result, verdict="does not fit", summary=remote.rejected)
    if machine_file is None and not machine.gpus:
        hint = "this machine has no GPU; plan for another one with --machine and its doctor report"
        result = replace(result, notes=(*result.notes, hint))
    assumptions = (*((assumption,) if assumption else ()), *demand.assumptions)
    if json_output:
        print_json(as_json(demand, result, machine, assumptions))
    else:
        print_plan(demand, result, machine, assumptions, out())
    raise typer.Exit(0 if result.verdict.startswith("fits") else 1)


@dataclass(frozen=True)
class RemoteData:
    """The copies of remote datasets: their size, and sentences about missing ones."""

    facts: dict[str, DatasetFacts]
    """By dataset id, for copies whose number of samples is known."""
    lines: tuple[str, ...] = ()
    rejected: str | None = None
    """Why the copies cannot be made on this machine; None if they can."""


def inspect_copies(config: RunConfig, environment: Environment, machine: Machine) -> RemoteData:
    """Measure existing copies, and list the remote storage for missing ones. Nothing is downloaded."""
    copies = Copies(config, HubAccess.of(environment))
    facts: dict[str, DatasetFacts] = {}
    lines: list[str] = []
    plans = []
    rejected = None
    for dataset, manifest in copies.complete():
        facts[dataset.id] = DatasetFacts(dataset.id, manifest.samples, manifest.bytes)
    try:
        plans = copies.plans()
        copies.check(plans, machine.host.headroom)
    except DataError as error:
        found = str(error).splitlines()
        if plans:
            rejected = " ".join(line.strip() for line in found)
        lines += [f"its size is not known: {found[0]}", *(line.strip() for line in found[1:])] if not plans else []
    for one in plans:
        lines += one.lines()
        if one.samples is not None:
            facts[one.dataset.id] = DatasetFacts(one.dataset.id, one.samples, one.layout.size)
    return RemoteData(facts, tuple(lines), rejected)


def _hints(config: RunConfig, machine: Machine, demand: Demand) -> list[str]:
    def held(role: Role) -> int:
        return sum(need.bytes for need in demand.needs if need.role == role and need.home == "host")

    return placement_lines(
        config, machine, latent_bytes=held("latent cache"), text_bytes=held("text cache"),
        local_ranks=demand.processes.per_machine,
    )  # fmt: skip


def read_machine(path: Path) -> Machine:
    """Read a machine from a doctor report (its key "machine"), or from a file that holds only the machine."""
    data = _read_json(path)
    if isinstance(data, dict) and "machine" in data:
        if len(data) > 1 and "checks" not in data:  # a benchmark result has a machine too
            raise _rejection(path, f"another kind of file, with {', '.join([*data][:4])}")
        if data.get("format", REPORT_FORMAT) != REPORT_FORMAT:
            raise _rejection(path, f"format {data['format']!r}; this release reads format {REPORT_FORMAT}")
        data = data["machine"]
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise _rejection(path, f"{location}: {first['msg']}") from error
    for location, amount in _amounts(machine).items():
        if amount is not None and amount < 0:
            raise _rejection(path, f"{location}: {amount} bytes, a negative size")
    return machine


def _amounts(machine: Machine) -> dict[str, int | None]:
    """The memory sizes that a plan uses, by their position in the file."""
    host, cgroup = machine.host, machine.host.cgroup
    found = {
        "host.mem_total": host.mem_total,
        "host.mem_available": host.mem_available,
        "host.cpu_mem_total": host.cpu_mem_total,
        "host.cpu_mem_available": host.cpu_mem_available,
        "host.cgroup.limit": cgroup.limit if cgroup else None,
        "host.cgroup.available": cgroup.available if cgroup else None,
    }
    for at, gpu in enumerate(machine.gpus):
        found |= {f"gpus[{at}].memory_total": gpu.memory_total, f"gpus[{at}].memory_free": gpu.memory_free}
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _rejection(path, error.strerror or type(error).__name__) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _rejection(path, f"not JSON: {error}") from error


def _rejection(path: Path, found: str) -> ConfigError:
    expected = "a report of gracetune doctor"
    hint = "make one on that machine: gracetune doctor --output machine.json"
    return ConfigError([Problem("--machine", found, expected, hint, str(path))])
