"""The input and the result of a doctor check."""

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
    """The result of one check. `remedy` says what to type or change; it is empty if the status is ok."""

    name: str
    status: Status
    finding: str
    remedy: str = ""


@dataclass(frozen=True)
class UvmReport:
    """The unified-memory settings from the environment variables, which the config package reads."""

    enabled: bool = False
    raw: str = ""
    """PyTorch's allocator string, unchanged."""
    oversubscription_ratio: float | None = None
    access_pattern: str | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Examination:
    """The input of all checks."""

    machine: Machine
    allocation: AllocationResult
    uvm: UvmReport | None = None
    """None if the environment was not read, for example for a recording of another machine."""
    require_gpu: bool = False
    minimums: Mapping[str, str] = field(default_factory=dict)
    visible_devices: str | None = None
    """The value of `CUDA_VISIBLE_DEVICES` if it is set."""
