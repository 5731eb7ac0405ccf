"""What one check of the doctor says, and what all of them may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gracetune.errors import Problem
from gracetune.hardware.allocation import AllocationResult
from gracetune.hardware.machine import Machine

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` is what to type or change; a check that is ok needs none."""

    name: str
    status: Status
    finding: str
    remedy: str = ""


@dataclass(frozen=True)
class UvmReport:
    """The unified-memory settings of the environment, as found (the config package reads them)."""

    enabled: bool = False
    raw: str = ""
    """PyTorch's allocator string, untouched."""
    oversubscription_ratio: float | None = None
    access_pattern: str | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Examination:
    """Everything the checks may look at."""

    machine: Machine
    allocation: AllocationResult
    uvm: UvmReport | None = None
    """None where nobody looked, as with a recording."""
    require_gpu: bool = False
    minimums: Mapping[str, str] = field(default_factory=dict)
    visible_devices: str | None = None
    """`CUDA_VISIBLE_DEVICES`, where it is set."""
