"""`gracetune doctor`: check whether this machine is fit for training, and what should be changed (docs/doctor.md).

`gh200_diagnostic.py` at the root of the repository runs the same code behind the older command line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gracetune.cli.console import out, print_json, session
from gracetune.cli.doctor_view import print_diagnosis
from gracetune.config.environment import ALLOCATOR_VARIABLES, Environment, memory_settings
from gracetune.config.path_status import inspect_path
from gracetune.errors import ConfigError, Problem
from gracetune.hardware.allocation import (
    DEFAULT_SCALE,
    AllocationResult,
    CudaManagedDriver,
    check_scale,
    host_reserve,
    plan_allocation,
    run_allocation,
    skipped,
)
from gracetune.hardware.checks import Examination, UvmReport
from gracetune.hardware.doctor import Diagnosis, diagnose
from gracetune.hardware.machine import Machine
from gracetune.hardware.probe import probe, read_host_memory
from gracetune.hardware.recording import load_recording, record
from gracetune.hardware.software import minimum_versions
from gracetune.memory.validate import validate
from gracetune.storage.atomic import check_writable, write_file


@dataclass(frozen=True)
class DoctorOptions:
    scale: float = DEFAULT_SCALE
    skip_allocation: bool = False
    force_oversubscription: bool = False
    require_gpu: bool = False
    record: Path | None = None
    from_recording: Path | None = None
    output: Path | None = None
    json: bool = False


def doctor(
    context: typer.Context,
    oversubscription_scale: Annotated[
        float, typer.Option(metavar="X", help="Size of the allocation test, in multiples of the GPU's memory.")
    ] = DEFAULT_SCALE,
    skip_allocation: Annotated[
        bool,
        typer.Option("--skip-allocation", help="Skip the allocation test and the experiments with managed memory."),
    ] = False,
    force_oversubscription: Annotated[
        bool,
        typer.Option(
            "--force-oversubscription",
            help="Exceed the GPU's memory even without a coherent link. This can hang the machine until a reboot.",
        ),
    ] = False,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="Fail if there is no usable GPU.")] = False,
    record_to: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="DIR",
            readable=False,
            help="Also write a recording of this machine, without host names, user names or serial numbers.",
        ),
    ] = None,
    from_recording: Annotated[
        Path | None, typer.Option(metavar="DIR", readable=False, help="Examine a recorded machine instead of this one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", readable=False, help="Also write the JSON report to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report and nothing else.")] = False,
) -> None:
    """Examine this machine: GPU, driver, memory mode, limits, versions. Exit code 1 if a check fails."""
    options = DoctorOptions(
        scale=oversubscription_scale,
        skip_allocation=skip_allocation,
        force_oversubscription=force_oversubscription,
        require_gpu=require_gpu,
        record=record_to,
        from_recording=from_recording,
        output=output,
        json=as_json,
    )
    raise typer.Exit(run_doctor(options, session(context).environment))


def run_doctor(options: DoctorOptions, environment: Environment) -> int:
    """Run the command. Returns its exit code."""
    if options.output is not None:
        reject_unwritable(options.output)
    diagnosis = examine(options, environment)
    report = diagnosis.to_json()
    if options.output is not None:
        write_report(options.output, report)
    if options.json:
        print_json(report)
    else:
        print_diagnosis(diagnosis, out())
    _print_output_path(options)
    return 0 if diagnosis.healthy else 1


def examine(options: DoctorOptions, environment: Environment) -> Diagnosis:
    _reject_contradictions(options)
    if options.from_recording is not None:
        machine = load_recording(options.from_recording)
        allocation = skipped(options.scale, "this is a recording, not the machine itself")
        # This machine's environment variables do not belong to the recorded machine.
        return diagnose(_examination(machine, allocation, options, None, None))
    if options.record is not None:
        record(options.record)
    machine = probe(free_memory=True)
    uvm = uvm_report(environment)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    diagnosis = diagnose(_examination(machine, _allocation(machine, options), options, uvm, visible))
    if machine.gpus and not options.skip_allocation:
        return replace(diagnosis, checks=(*diagnosis.checks, *validate(one_pool=machine.profile.value == "integrated")))
    return diagnosis


def _examination(
    machine: Machine, allocation: AllocationResult, options: DoctorOptions, uvm: UvmReport | None, visible: str | None
) -> Examination:
    return Examination(
        machine=machine,
        allocation=allocation,
        uvm=uvm,
        require_gpu=options.require_gpu,
        minimums=minimum_versions(),
        visible_devices=visible,
    )


def _reject_contradictions(options: DoctorOptions) -> None:
    check_scale(options.scale)
    if options.record is not None and options.from_recording is not None:
        problem = Problem("--record", "together with --from-recording", "one of the two", "copy the folder instead")
        raise ConfigError([problem])


def _allocation(machine: Machine, options: DoctorOptions) -> AllocationResult:
    if options.skip_allocation:
        return skipped(options.scale, "--skip-allocation")
    return allocate_beyond(machine, options.scale, force=options.force_oversubscription)


def allocate_beyond(machine: Machine, scale: float, *, force: bool) -> AllocationResult:
    """The allocation test, as large as is safe on this machine."""
    plan = plan_allocation(machine, scale, force=force)
    return run_allocation(
        plan,
        CudaManagedDriver(),
        headroom=lambda: read_host_memory(machine.gpus).headroom,
        reserve=host_reserve(machine),
    )


def uvm_report(environment: Environment) -> UvmReport:
    """The unified-memory settings of the environment, as the config package reads them."""
    memory = memory_settings(environment)
    values = {name: setting.value for name, setting in memory.settings.items()}
    raw = next((text for name in ALLOCATOR_VARIABLES if (text := environment.get(name))), "")
    return UvmReport(
        enabled=bool(values.get("use_uvm")),
        raw=raw,
        oversubscription_ratio=values.get("uvm_oversubscription_ratio"),
        access_pattern=values.get("uvm_access_pattern"),
        problems=memory.problems,
    )


def reject_unwritable(path: Path) -> None:
    """Reject an output file that cannot be written, before minutes of examination."""
    status = inspect_path(path)
    if status.kind in ("folder", "unreachable"):
        raise _unwritable(path, status.words)
    try:
        check_writable(status.path.parent)
    except OSError as error:
        raise _unwritable(path, error.strerror) from error


def _unwritable(path: Path, why: str | None) -> ConfigError:
    return ConfigError([Problem("--output", f"{path}: {why}", "a file we can write", "--output report.json")])


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report atomically."""
    try:
        write_file(inspect_path(path).path, f"{json.dumps(report, indent=2)}\n".encode())
    except OSError as error:
        raise _unwritable(path, error.strerror) from error


def _print_output_path(options: DoctorOptions) -> None:
    """Print on stderr where files were written, so that stdout has only the JSON object."""
    if options.record is not None:
        typer.echo(f"Recording written to {options.record} (docs/doctor.md says how to send it)", err=True)
    if options.output is not None:
        typer.echo(f"Report written to {options.output}", err=True)
