from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from gracetune.bench.step.clock import measure
from gracetune.bench.step.power import GpuPower

FAKE = r"""
#include <string.h>
static int handle;
static unsigned long long millijoules = 5000;
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &handle;
    return strcmp(uuid, "GPU-one") != 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *value) {
    *value = millijoules += 1500;
    return device != &handle || ENERGY;
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *value) {
    *value = kind == 1 ? 1755 : 0;
    return device != &handle;
}
"""


def library(folder: Path, *, init: int = 0, energy: int = 0) -> str:
    """A shared library with NVML's functions. `init` and `energy` are the results of two of them."""
    file = folder / "fake.c"
    file.write_text(FAKE)
    built = folder / "libfake.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DINIT={init}", f"-DENERGY={energy}", str(file), "-o", str(built)], check=True
    )
    return str(built)


def test_energy_and_clock_are_read(tmp_path: Path) -> None:
    power = GpuPower("GPU-one", library(tmp_path))
    assert (power.joules(), power.joules(), power.clock_mhz()) == (6.5, 8.0, 1755)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert GpuPower("GPU-one", str(tmp_path / "none.so")).joules() is None
    without_energy = GpuPower("GPU-one", library(tmp_path, energy=3))
    assert (without_energy.joules(), without_energy.clock_mhz()) == (None, 1755)
    other = GpuPower("GPU-two", library(tmp_path))
    assert (other.joules(), other.clock_mhz()) == (None, None)


def test_no_driver(tmp_path: Path) -> None:
    power = GpuPower("GPU-one", library(tmp_path, init=9))
    assert (power.joules(), power.clock_mhz()) == (None, None)


def test_energy_is_the_mean_of_the_timed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power = GpuPower("GPU-one", library(tmp_path))
    monkeypatch.setattr(GpuPower, "of", classmethod(lambda cls, device: power))
    pace = measure(lambda: torch.zeros(()), torch.device("cpu"), 30)
    assert pace.joules == pytest.approx(0.05)
    assert pace.clock_mhz == 1755
