"""The command behind `validate_uvm.py`: the memory layer's experiments, then the allocation test."""

from __future__ import annotations

from dataclasses import asdict

from gracetune.cli.console import out, print_json
from gracetune.cli.doctor import allocate_beyond
from gracetune.cli.doctor_view import print_check
from gracetune.hardware import checks as doctor_checks
from gracetune.hardware import probe
from gracetune.hardware.checks import Examination
from gracetune.memory.validate import validate


def run_validation(device: int, *, scale: float, force: bool, as_json: bool) -> int:
    """Run the validation. Returns the exit code: 1 if a check failed, or if there is no GPU to check."""
    machine = probe(free_memory=True)
    checks = list(validate(device, one_pool=machine.profile.value == "integrated"))
    allocation = allocate_beyond(machine, scale, force=force)
    checks.append(doctor_checks.allocation(Examination(machine, allocation)))
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "uvm_allocation_test": allocation.to_json()})
    else:
        console = out()
        for check in checks:
            print_check(console, check)
    return 1 if any(check.status == "fail" for check in checks) or not machine.gpus else 0
