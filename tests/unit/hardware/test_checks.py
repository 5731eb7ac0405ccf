from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.errors import Problem
from gracetune.hardware import checks
from gracetune.hardware.allocation import AllocationResult, skipped
from gracetune.hardware.checks import Check, Examination, UvmReport
from gracetune.hardware.doctor import CHECKS, diagnose
from gracetune.hardware.machine import Cgroup, Gpu, GpuAttributes, Machine
from gracetune.units import GIB, KIB, MIB
from unit.hardware.machines import NAMES, load

SKIPPED = skipped(1.5, "not here")
RATIO = Problem(
    "PYTORCH_CUDA_ALLOC_CONF", "uvm_oversubscription_ratio:5.0x", "a number", "write uvm_oversubscription_ratio:5.0"
)


def exam(machine: Machine | str, **facts: Any) -> Examination:
    found = load(machine) if isinstance(machine, str) else machine
    return Examination(machine=found, **({"allocation": SKIPPED} | facts))


def changed(name: str, part: str, **update: Any) -> Machine:
    """A modelled machine with some fields of `host`, `driver` or `software` changed."""
    machine = load(name)
    return machine.model_copy(update={part: getattr(machine, part).model_copy(update=update)})


def with_gpu(name: str, **update: Any) -> Machine:
    machine = load(name)
    first, *rest = machine.gpus
    return machine.model_copy(update={"gpus": (first.model_copy(update=update), *rest)})


def run(check: Callable[[Examination], Check | None], examination: Examination) -> Check:
    result = check(examination)
    assert result is not None
    assert result.status == "ok" or result.remedy
    return result


# --- GPU and driver ---------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_told_what_works() -> None:
    result = run(checks.gpu, exam("cpu-only"))
    assert result.status == "warn"
    assert "Available:" in result.finding
    assert "Not available:" in result.finding
    assert run(checks.gpu, exam("cpu-only", require_gpu=True)).status == "fail"
    assert run(checks.gpu, exam("gb200", require_gpu=True)).status == "ok"


def test_a_gpu_nobody_drives_is_mentioned() -> None:
    result = run(checks.gpu, exam(changed("cpu-only", "host", nvidia_pci_devices=2)))
    assert "2 NVIDIA device(s) on the PCI bus" in result.finding
    assert "driver" in result.remedy


@pytest.mark.parametrize(
    ("code", "pci", "module", "visible", "status", "words"),
    [
        (803, 1, "580.1", None, "fail", "differ in version"),
        (999, 1, "580.1", None, "fail", "nvidia-modprobe"),
        (12345, 1, "580.1", None, "fail", "nvidia-smi"),
        (100, 1, None, None, "fail", "CUDA_VISIBLE_DEVICES"),
        (100, 0, "580.1", None, "fail", "CUDA_VISIBLE_DEVICES"),
        (100, 0, None, None, "warn", "CUDA_VISIBLE_DEVICES"),
        (100, 1, "580.1", "", "warn", "unset CUDA_VISIBLE_DEVICES"),
        (100, 1, "580.1", "-1", "warn", "unset CUDA_VISIBLE_DEVICES"),
        (100, 1, "580.1", "7", "fail", "CUDA_VISIBLE_DEVICES"),
        (803, 1, "580.1", "", "fail", "differ in version"),
    ],
)
def test_a_driver_that_fails_is_a_finding(
    code: int, pci: int, module: str | None, visible: str | None, status: str, words: str
) -> None:
    machine = changed("cpu-only", "driver", status="failed", detail=f"cuInit: X ({code})", error_code=code)
    host = machine.host.model_copy(update={"nvidia_pci_devices": pci, "nvidia_kernel_driver": module})
    result = run(checks.driver, exam(machine.model_copy(update={"host": host}), visible_devices=visible))
    assert result.status == status
    assert words in result.remedy


def test_a_kernel_module_without_libcuda_is_a_container_started_without_the_gpu() -> None:
    result = run(checks.driver, exam(changed("cpu-only", "host", nvidia_kernel_driver="580.1")))
    assert result.status == "warn"
    assert "--gpus all" in result.remedy
    assert run(checks.driver, exam("cpu-only")).status == "ok"


@pytest.mark.parametrize(
    ("driver", "torch", "status"),
    [
        ("13.0", "13.0", "ok"),
        ("13.2", "13.0", "ok"),
        ("13.0", "12.8", "ok"),
        ("12.8", "13.0", "fail"),
        ("12.4", "12.8", "warn"),
        (None, "13.0", "warn"),
    ],
)
def test_driver_against_torch(driver: str | None, torch: str, status: str) -> None:
    machine = changed("gh200-numa", "driver", cuda_version=driver)
    software = machine.software.model_copy(update={"torch_cuda": torch})
    assert run(checks.driver_cuda, exam(machine.model_copy(update={"software": software}))).status == status


def test_there_is_nothing_to_compare_without_gpu_or_cuda_torch() -> None:
    assert checks.driver_cuda(exam("cpu-only")) is None
    assert checks.driver_cuda(exam(changed("gh200-numa", "software", torch_cuda=None))) is None


def test_a_gpu_that_cannot_be_opened_fails() -> None:
    result = run(checks.gpu_memory, exam(with_gpu("x86-h200", context_error="X (46)", memory_free=None)))
    assert result.status == "fail"
    assert "GPU 0 cannot be opened: X (46)" in result.finding


def test_an_occupied_gpu_is_a_warning() -> None:
    result = run(checks.gpu_memory, exam(with_gpu("x86-h200", memory_free=20 * GIB)))
    assert (result.status, "20.0 GiB" in result.finding) == ("warn", True)
    assert run(checks.gpu_memory, exam("x86-h200")).status == "ok"
    assert checks.gpu_memory(exam("gb10")) is None  # no number there means anything


def test_page_cache_in_gpu_memory_is_named_as_such() -> None:
    machine = with_gpu("gh200-numa", memory_free=50 * GIB)
    nodes = tuple(
        node.model_copy(update={"page_cache": 40 * GIB}) if node.is_gpu_memory else node
        for node in machine.host.numa_nodes
    )
    host = machine.host.model_copy(update={"numa_nodes": nodes})
    result = run(checks.gpu_memory, exam(machine.model_copy(update={"host": host})))
    assert "page cache" in result.finding
    assert "drop_caches" in result.remedy


def test_memory_modes_are_explained() -> None:
    for name in NAMES:
        result = checks.memory_mode(exam(name))
        assert (result is None) == (name == "cpu-only")
        assert result is None or result.status == "ok"
    unknown = load("gh200-numa")
    unknown = unknown.model_copy(update={"memory_mode": unknown.memory_mode.model_copy(update={"value": "unknown"})})
    assert run(checks.memory_mode, exam(unknown)).status == "warn"


@pytest.mark.parametrize(
    ("managed", "concurrent", "uvm", "status"),
    [
        (True, True, True, "ok"),
        (False, False, False, "warn"),
        (False, False, True, "fail"),
        (True, False, False, "warn"),
        (True, None, True, "fail"),
        (None, None, False, "warn"),
    ],
)
def test_managed_memory(managed: bool | None, concurrent: bool | None, uvm: bool, status: str) -> None:
    attributes = GpuAttributes(managed_memory=managed, concurrent_managed_access=concurrent)
    machine = with_gpu("x86-h200", attributes=attributes)
    result = run(checks.managed_memory, exam(machine, uvm=UvmReport(enabled=uvm)))
    assert result.status == status
    if managed is None:
        assert "does not report" in result.finding


def test_gpus_of_different_kinds_are_a_warning() -> None:
    machine = load("gb200")
    other = Gpu(index=1, coherent_link=False, attributes=GpuAttributes(integrated=False))
    assert checks.mixed_gpus(exam(machine)) is None
    mixed = machine.model_copy(update={"gpus": (machine.gpus[0], other)})
    assert run(checks.mixed_gpus, exam(mixed)).status == "warn"


def test_a_narrow_slot_is_a_warning_and_only_on_discrete_gpus() -> None:
    pcie = load("x86-h200").gpus[0].pcie
    assert pcie is not None
    narrow = pcie.model_copy(update={"width": 8})
    result = run(checks.link, exam(with_gpu("x86-h200", pcie=narrow)))
    assert (result.status, "8 of 16" in result.finding) == ("warn", True)
    assert run(checks.link, exam("x86-h200")).status == "ok"
    assert checks.link(exam("gh200-numa")) is None
    assert checks.link(exam(with_gpu("x86-h200", pcie=None))) is None


# --- software and host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "torch", "cuda", "status"),
    [
        ("cpu-only", None, None, "fail"),
        ("cpu-only", "2.13.0+cpu", None, "ok"),
        ("cpu-only", "2.13.0+cu130", "13.0", "ok"),
        ("cpu-only", "2.10.0", None, "fail"),
        ("gh200-numa", "2.13.0+cpu", None, "fail"),
        ("gh200-numa", "2.11.0a0+nv25.10", "13.0", "ok"),
        ("gh200-numa", "2.9.0", "13.0", "fail"),
    ],
)
def test_torch(machine: str, torch: str | None, cuda: str | None, status: str) -> None:
    found = changed(machine, "software", torch=torch, torch_cuda=cuda)
    assert run(checks.torch, exam(found)).status == status


def test_libraries() -> None:
    wanted = {"torch": "2.11", "diffusers": "0.42", "peft": "0.21", "unasked": "1"}
    assert run(checks.libraries, exam("gh200-numa", minimums=wanted)).status == "ok"
    assert run(checks.libraries, exam("gh200-numa")).status == "ok"
    broken = changed("gh200-numa", "software", libraries={"diffusers": "0.35.1", "peft": None})
    result = run(checks.libraries, exam(broken, minimums=wanted))
    assert result == Check(
        "libraries",
        "fail",
        "missing: peft; too old: diffusers 0.35.1",
        "pip install -U 'diffusers>=0.42' 'peft>=0.21'",
    )


@pytest.mark.parametrize(
    ("available", "status"), [(470 * GIB, "ok"), (30 * GIB, "warn"), (48 * GIB, "ok"), (None, "warn"), (0, "warn")]
)
def test_host_memory(available: int | None, status: str) -> None:
    machine = changed("gh200-cdmm", "host", cpu_mem_available=available)
    assert run(checks.host_memory, exam(machine)).status == status


def test_host_memory_says_when_the_kernels_number_includes_hbm() -> None:
    assert "include GPU memory" in run(checks.host_memory, exam("gh200-numa")).finding
    assert "include GPU memory" not in run(checks.host_memory, exam("gh200-cdmm")).finding
    assert "122 GiB of 128 GiB" in run(checks.host_memory, exam("x86-h200-cgroup")).finding


@pytest.mark.parametrize(
    ("cgroup", "status"),
    [
        (None, "warn"),
        (Cgroup(version=2), "ok"),
        (Cgroup(version=2, limit=900 * GIB), "ok"),
        (Cgroup(version=2, limit=64 * GIB, available=60 * GIB), "warn"),
        (Cgroup(version=2, throttle=64 * GIB), "warn"),
        (Cgroup(version=2, limit=900 * GIB, throttle=950 * GIB), "ok"),
    ],
)
def test_cgroup(cgroup: Cgroup | None, status: str) -> None:
    assert run(checks.cgroup, exam(changed("gh200-cdmm", "host", cgroup=cgroup))).status == status


def test_pinned_memory() -> None:
    assert checks.pinned_memory(exam("cpu-only")) is None
    assert run(checks.pinned_memory, exam("x86-h200")).status == "ok"
    assert run(checks.pinned_memory, exam("gb200")).status == "ok"
    assert run(checks.pinned_memory, exam(changed("gb200", "host", memlock_limit=8 * MIB))).status == "warn"


@pytest.mark.parametrize(
    ("name", "swap", "status"),
    [("gb10", 0, "ok"), ("gb10", GIB, "warn"), ("gb10", None, None), ("x86-h200", GIB, None)],
)
def test_swap_matters_on_one_pool(name: str, swap: int | None, status: str | None) -> None:
    result = checks.swap(exam(changed(name, "host", swap_total=swap)))
    assert (result.status if result else None) == status


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("gh200-numa", 1, "warn"),
        ("gh200-numa", 0, "ok"),
        ("gh200-cdmm", 2, "warn"),
        ("gh200-numa", None, None),
        ("x86-h200", 1, None),
        ("gb10", 1, None),
        ("cpu-only", 1, None),
    ],
)
def test_numa_balancing_matters_on_superchips(name: str, value: int | None, status: str | None) -> None:
    result = checks.numa_balancing(exam(changed(name, "host", numa_balancing=value)))
    assert (result.status if result else None) == status


@pytest.mark.parametrize(
    ("size", "mode", "page", "huge"),
    [
        (64 * KIB, "madvise", "ok", "ok"),
        (64 * KIB, "always", "ok", "warn"),
        (64 * KIB, "never", "ok", "ok"),
        (4 * KIB, "always", "warn", "ok"),
        (4 * KIB, "never", "warn", "warn"),
        (4 * KIB, "madvise", "warn", "ok"),
        (None, None, None, None),
    ],
)
def test_pages_on_superchips(size: int | None, mode: str | None, page: str | None, huge: str | None) -> None:
    machine = changed("gh200-numa", "host", page_size=size, transparent_huge_pages=mode)
    results = checks.page_size(exam(machine)), checks.huge_pages(exam(machine))
    assert tuple(result.status if result else None for result in results) == (page, huge)
    assert checks.page_size(exam("gb10")) is None
    assert checks.huge_pages(exam("cpu-only")) is None


@pytest.mark.parametrize(
    ("name", "uvm", "status"),
    [
        ("gh200-numa", UvmReport(), "ok"),
        ("gh200-numa", UvmReport(enabled=True, oversubscription_ratio=5.0, access_pattern="cpu_first"), "ok"),
        ("gh200-numa", UvmReport(enabled=True, problems=(RATIO,)), "fail"),
        ("x86-h200", UvmReport(enabled=True), "warn"),
        ("gb10", UvmReport(enabled=True), "warn"),
        ("cpu-only", UvmReport(enabled=True), "warn"),
        ("cpu-only", UvmReport(), "ok"),
    ],
)
def test_uvm_settings(name: str, uvm: UvmReport, status: str) -> None:
    assert run(checks.uvm, exam(name, uvm=uvm)).status == status


def test_what_to_type_is_the_remedy() -> None:
    result = run(checks.uvm, exam("gh200-numa", uvm=UvmReport(enabled=True, problems=(RATIO,))))
    assert result.remedy == RATIO.hint
    assert "5.0x" in result.finding


def test_the_worst_policy_is_named() -> None:
    assert checks.uvm_policy(exam("gh200-numa", uvm=UvmReport(access_pattern="cpu_first"))) is None
    result = run(checks.uvm_policy, exam("gh200-numa", uvm=UvmReport(access_pattern="gpu_first")))
    assert result.status == "warn"
    assert "cpu_first" in result.remedy


def test_nobody_looked_is_not_the_same_as_nothing_found() -> None:
    assert checks.uvm(exam("gh200-numa")) is None
    assert checks.uvm_policy(exam("gh200-numa")) is None


def test_allocation_results() -> None:
    done = AllocationResult(1.5, "reduced", "why", allocated=4 * GIB, allocation_seconds=0.1, fill_seconds=2.0)
    result = run(checks.allocation, exam("x86-h200", allocation=done))
    assert (result.status, "2.0 GiB/s" in result.finding, "why" in result.finding) == ("ok", True, True)
    failed = AllocationResult(1.5, "failed", "", error="cuMemAllocManaged: X (2)")
    result = run(checks.allocation, exam("x86-h200", allocation=failed))
    assert (result.status, "cuMemAllocManaged: X (2)" in result.finding) == ("fail", True)
    assert run(checks.allocation, exam("x86-h200")).finding == "skipped: not here"


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_is_readable_everywhere(name: str) -> None:
    settings = UvmReport(enabled=True, access_pattern="gpu_first", problems=(RATIO,))
    for uvm in (None, UvmReport(), settings):
        diagnosis = diagnose(exam(name, uvm=uvm, require_gpu=True))
        names = [check.name for check in diagnosis.checks]
        assert len(names) == len(set(names))
        for check in diagnosis.checks:
            assert (check.finding + check.remedy).isascii()
            assert len(check.name) <= 15
            assert check.finding.strip()
            assert bool(check.remedy) == (check.status != "ok")


_dropped = st.sets(
    st.sampled_from(
        [
            "mem_total",
            "mem_available",
            "cpu_mem_total",
            "cpu_mem_available",
            "cgroup",
            "page_size",
            "numa_balancing",
            "memlock_limit",
            "transparent_huge_pages",
            "swap_total",
            "nvidia_pci_devices",
            "nvidia_kernel_driver",
        ]
    )
)
_gpu_dropped = st.sets(
    st.sampled_from(["name", "memory_total", "memory_free", "pcie", "numa_node", "is_numa_node", "coherent_link"])
)


@given(name=st.sampled_from(NAMES), host=_dropped, gpu=_gpu_dropped, bare=st.booleans())
def test_unknown_facts_never_stop_the_doctor(name: str, host: set[str], gpu: set[str], bare: bool) -> None:
    machine = load(name)
    attributes = {"attributes": GpuAttributes()} if bare else {}
    gpus = tuple(one.model_copy(update=dict.fromkeys(gpu) | attributes) for one in machine.gpus)
    found = machine.model_copy(update={"host": machine.host.model_copy(update=dict.fromkeys(host)), "gpus": gpus})
    assert diagnose(exam(found, uvm=UvmReport(enabled=True))).checks


def test_the_doctors_list_is_complete() -> None:
    """A check that is not in the list never runs."""
    defined = {
        function
        for name, function in vars(checks).items()
        if isinstance(function, FunctionType) and not name.startswith("_") and function.__module__ == checks.__name__
    }
    assert defined == set(CHECKS)
