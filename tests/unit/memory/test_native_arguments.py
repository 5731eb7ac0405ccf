"""No argument of an exported function can crash the process: for NULL and extreme numbers it returns an error code."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.memory.native import SlotPolicy
from gracetune.memory.native.binding import _SIGNATURES, Code
from gracetune.units import GIB, MIB

SWEEP = Path(__file__).parents[2] / "fixtures/fake_libcuda/sweep.py"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def sweep(shim: Path, fake: Path, *mode: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SWEEP), str(shim), str(fake), *mode]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_names_and_numbers_that_have_to_be_given(bench):
    shim = ctypes.CDLL(str(bench.uvm.path))
    assert shim.gt_has_function(None) == Code.ARGUMENT
    assert shim.gt_driver_version(None) == Code.ARGUMENT


def test_every_exported_function_is_in_the_sweep(workshop):
    listed = subprocess.run(["nm", "-D", "--defined-only", str(workshop.shim())], capture_output=True, text=True)
    exported = set(re.findall(r"\b(gt_\w+)$", listed.stdout, re.MULTILINE))
    slots = {f"gt_slot{slot}_{kind}" for slot in range(8) for kind in ("alloc", "free")}
    assert exported == {*_SIGNATURES, *slots, "gt_abi_version"}


@pytest.mark.parametrize("mode", [(), ("before",)], ids=["started", "before it is started"])
@pytest.mark.parametrize("options", [(), ("-DFAKE_NO_OPTIONAL",)], ids=["new driver", "old driver"])
def test_no_arguments_end_the_process(workshop, options, mode):
    done = sweep(workshop.shim(), workshop.fake(*options).path, *mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 20_000


def test_a_slot_is_not_told_to_free_what_it_never_had(bench):
    """A wrong size would corrupt the counters for the rest of the process."""
    bench.uvm.configure_slot(0, SlotPolicy(0, GIB))
    slot = bench.slot()
    pointer = slot.alloc(MIB)
    for size in (0, MIB + 1, 2**64 - 1):
        slot.free(pointer, size)
    stats = bench.uvm.slot_stats(0)
    assert (stats.live_bytes, stats.frees, stats.failed_frees) == (MIB, 0, 3)
    slot.free(pointer, MIB)
    assert bench.uvm.slot_stats(0).live_bytes == bench.fake.in_use == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", [(), ("before",)], ids=["started", "before it is started"])
def test_the_sanitizers_have_nothing_to_say_about_the_sweep(workshop, mode):
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip("gcc has no address sanitizer here")
    shim, fake = workshop.shim(*SANITIZED), workshop.compile_fake(*SANITIZED)
    environment = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = sweep(shim, fake, *mode, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
