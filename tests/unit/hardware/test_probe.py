from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.hardware import probe
from gracetune.hardware.driver import Attribute, CudaDriver, DeviceFacts, DriverFacts
from gracetune.hardware.files import HostFiles
from gracetune.hardware.host import ProcessFacts
from gracetune.hardware.machine import Machine, Software
from gracetune.hardware.probe import assemble, read_host_memory
from gracetune.units import GIB
from unit.hardware.machines import MACHINES, NAMES, FakeCuda, ReplayDriver, load

EXPECTED = {
    "cpu-only": ("cpu", "none"),
    "gb10": ("integrated", "integrated one-pool"),
    "gb200": ("superchip", "coherent NUMA"),
    "gh200-cdmm": ("superchip", "coherent CDMM"),
    "gh200-numa": ("superchip", "coherent NUMA"),
    "x86-h200": ("discrete", "discrete"),
    "x86-h200-cgroup": ("discrete", "discrete"),
    "x86-h200-recorded": ("discrete", "discrete"),
}


def test_every_machine_is_expected_here_and_says_where_it_comes_from() -> None:
    assert set(NAMES) == set(EXPECTED)
    for name in NAMES:
        source = (MACHINES / name / "SOURCE").read_text(encoding="utf-8")
        if name.endswith("-recorded"):
            assert source.startswith("Recorded from a real machine")
            continue
        assert source.startswith("Modelled, not recorded")
        assert len(source.splitlines()) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_profiles_of_the_modelled_machines(name: str) -> None:
    machine = load(name)
    assert (machine.profile.value, machine.memory_mode.value) == EXPECTED[name]
    assert machine.profile.reason
    assert machine.memory_mode.reason


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip_is_the_identity(name: str) -> None:
    machine = load(name)
    assert Machine.model_validate_json(machine.model_dump_json()) == machine


@pytest.mark.parametrize("name", NAMES)
def test_the_modelled_machines_are_complete(name: str) -> None:
    host = load(name).host
    known = ("architecture", "kernel", "cpu_model", "cpu_count", "page_size", "mem_total", "mem_available", "cgroup")
    assert [field for field in known if getattr(host, field) is None] == []
    assert host.transparent_huge_pages in ("always", "madvise", "never")
    assert host.numa_balancing in (0, 1)
    assert host.memlock_limit is not None


def test_numa_mode_counts_hbm_as_gpu_memory_and_not_as_main_memory() -> None:
    numa, cdmm = load("gh200-numa"), load("gh200-cdmm")
    assert len(numa.host.numa_nodes) == 9
    assert [node.id for node in numa.host.numa_nodes if node.is_gpu_memory] == [1]
    assert numa.gpus[0].numa_node == 1
    assert (numa.host.mem_total or 0) - (numa.host.cpu_mem_total or 0) == 95 * GIB
    # The same machine in its two modes has the same main memory.
    assert numa.host.cpu_mem_total == cdmm.host.cpu_mem_total == cdmm.host.mem_total
    assert numa.host.headroom == cdmm.host.headroom
    assert (cdmm.gpus[0].is_numa_node, cdmm.gpus[0].numa_node) == (False, None)


def test_two_gpus_each_have_their_node() -> None:
    machine = load("gb200")
    assert [gpu.numa_node for gpu in machine.gpus] == [1, 9]
    assert [node.id for node in machine.host.numa_nodes if node.is_gpu_memory] == [1, 9]
    assert [gpu.pci_address for gpu in machine.gpus] == ["0008:01:00.0", "0009:01:00.0"]


def test_a_container_limit_is_what_counts() -> None:
    host = load("x86-h200-cgroup").host
    assert host.cgroup is not None
    assert (host.cgroup.version, host.cgroup.limit) == (1, 128 * GIB)
    assert host.headroom == host.cgroup.available == 122 * GIB
    assert host.memory_limit == 128 * GIB
    assert host.container == "docker"
    free = load("x86-h200").host
    assert free.cgroup is not None
    assert free.cgroup.limit is None
    assert free.headroom == free.mem_available


def test_the_x86_machine_has_its_link_and_the_measured_attributes() -> None:
    gpu = load("x86-h200").gpus[0]
    assert gpu.pcie is not None
    assert (gpu.pcie.speed_gts, gpu.pcie.width) == (32.0, 16)
    found = gpu.attributes
    assert (found.concurrent_managed_access, found.pageable_memory_access) == (True, False)
    assert (found.pageable_uses_host_page_tables, gpu.coherent_link) == (False, False)


def _with_cpuless_node(root: Path, *, config: int | None, node: int) -> Machine:
    for name, text in {
        "proc/meminfo": "MemTotal: 300 kB\nMemAvailable: 250 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 200 kB\nNode 0 MemFree: 150 kB\n",
        "sys/devices/system/node/node1/cpulist": "\n",
        "sys/devices/system/node/node1/meminfo": "".join(
            f"Node 1 {name}: {size} kB\n" for name, size in {"MemTotal": 100, "MemFree": 70, "FilePages": 20}.items()
        ),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    attributes = {
        Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED.name: 0,
        Attribute.CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED.name: 1,
        Attribute.CU_DEVICE_ATTRIBUTE_NUMA_ID.name: node,
    }
    if config is not None:
        attributes[Attribute.CU_DEVICE_ATTRIBUTE_NUMA_CONFIG.name] = config
    facts = DriverFacts(status="ok", detail="ok", devices=(DeviceFacts(attributes=attributes),))
    return assemble(HostFiles(root), facts, ProcessFacts(), Software())


@pytest.mark.parametrize(
    ("config", "node", "is_gpu", "total", "available"),
    [
        (1, 1, True, 200, 160),  # claimed: free memory and page cache on it are the GPU's, too
        (0, -1, False, 300, 250),  # the driver keeps its memory, so this is CXL or the like
        (None, 1, None, 200, 160),  # an older driver: unknown, and left out to be careful
    ],
)
def test_memory_without_cpus(
    tmp_path: Path, config: int | None, node: int, is_gpu: bool | None, total: int, available: int
) -> None:
    machine = _with_cpuless_node(tmp_path, config=config, node=node)
    assert machine.host.numa_nodes[1].is_gpu_memory is is_gpu
    assert (machine.host.cpu_mem_total, machine.host.cpu_mem_available) == (total * 1024, available * 1024)


def test_the_host_can_be_asked_again(tmp_path: Path) -> None:
    machine = _with_cpuless_node(tmp_path, config=1, node=1)
    assert read_host_memory(machine.gpus, tmp_path).headroom == 160 * 1024


def test_a_failing_driver_leaves_no_gpu_but_says_so() -> None:
    facts = DriverFacts(status="failed", detail="cuInit: CUDA_ERROR_UNKNOWN (999)", error_code=999, cuda_version=12080)
    machine = probe(driver=ReplayDriver(facts))
    assert machine.gpus == ()
    assert (machine.driver.status, machine.driver.error_code, machine.driver.cuda_version) == ("failed", 999, "12.8")


def test_a_probe_through_the_driver_library(fake_cuda: FakeCuda) -> None:
    gpu = probe(driver=CudaDriver(fake_cuda.path), free_memory=True).gpus[0]
    assert (gpu.name, gpu.compute_capability, gpu.multiprocessors) == ("Fake GPU", "9.0", 7)
    assert gpu.pci_address == "0001:3b:02.0"
    assert gpu.coherent_link is None  # the fake knows none of the three signs


def test_this_machine() -> None:
    machine = probe()
    assert Machine.model_validate_json(machine.model_dump_json()) == machine
    assert machine.host.cpu_count == len(os.sched_getaffinity(0))
    assert machine.host.architecture == os.uname().machine
    assert machine.host.kernel == os.uname().release
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs((machine.host.mem_total or 0) - pages) < GIB


def test_affinity_is_respected() -> None:
    code = "from gracetune.hardware import probe; print(probe().host.cpu_count)"
    first = min(os.sched_getaffinity(0))
    run = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{first}]); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "1"


def test_probing_imports_no_torch() -> None:
    code = "import sys; from gracetune.hardware import probe; probe(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
