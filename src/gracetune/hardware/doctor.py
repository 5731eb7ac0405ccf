"""The doctor: all checks in the order of the report, the overall result, and the JSON report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gracetune.hardware import checks
from gracetune.hardware.checks import Check, Examination, UvmReport
from gracetune.hardware.machine import Machine
from gracetune.units import GIB

REPORT_FORMAT = 1

CHECKS: tuple[Callable[[Examination], Check | None], ...] = (
    checks.gpu,
    checks.driver,
    checks.driver_cuda,
    checks.torch,
    checks.libraries,
    checks.memory_mode,
    checks.managed_memory,
    checks.mixed_gpus,
    checks.gpu_memory,
    checks.link,
    checks.host_memory,
    checks.cgroup,
    checks.pinned_memory,
    checks.swap,
    checks.numa_balancing,
    checks.page_size,
    checks.huge_pages,
    checks.uvm,
    checks.uvm_policy,
    checks.allocation,
)


@dataclass(frozen=True)
class Diagnosis:
    """The input and the results of all checks."""

    examination: Examination
    checks: tuple[Check, ...]

    @property
    def machine(self) -> Machine:
        return self.examination.machine

    @property
    def healthy(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The JSON report. `system`, `torch_version` and `uvm_allocation_test` have the format of the older
        gh200_diagnostic.py, where a GB is 2**30 bytes."""
        return {
            "format": REPORT_FORMAT,
            "profile": self.machine.profile.value,
            "reason": self.machine.profile.reason,
            "checks": [asdict(check) for check in self.checks],
            "uvm": _uvm(self.examination.uvm),
            "system": _system(self.machine),
            "torch_version": self.machine.software.torch,
            "uvm_allocation_test": self.examination.allocation.to_json(),
            "machine": self.machine.model_dump(mode="json"),
        }


def diagnose(examination: Examination) -> Diagnosis:
    results = (check(examination) for check in CHECKS)
    return Diagnosis(examination, tuple(result for result in results if result is not None))


def _uvm(uvm: UvmReport | None) -> dict[str, object]:
    return {
        "enabled": uvm.enabled if uvm else None,
        "raw": uvm.raw if uvm else None,
        "oversubscription_ratio": uvm.oversubscription_ratio if uvm else None,
        "access_pattern": uvm.access_pattern if uvm else None,
    }


def _system(machine: Machine) -> dict[str, object]:
    gpu = machine.gpus[0] if machine.gpus else None
    return {
        "architecture": machine.host.architecture,
        "kernel": machine.host.kernel,
        "cpu_count": machine.host.cpu_count,
        "total_ram_gb": _gb(machine.host.mem_total),
        "available_ram_gb": _gb(machine.host.mem_available),
        "gpu_name": gpu.name if gpu else None,
        "gpu_memory_gb": _gb(gpu.memory_total) if gpu else None,
        "cuda_version": machine.software.torch_cuda,
        "driver": machine.host.nvidia_kernel_driver,
    }


def _gb(count: int | None) -> float | None:
    return None if count is None else round(count / GIB, 1)
