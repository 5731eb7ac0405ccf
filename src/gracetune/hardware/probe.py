"""The probe: describes the machine as a frozen `Machine`, from the driver, `/proc`, `/sys` and installed software."""

from __future__ import annotations

from pathlib import Path

from gracetune.hardware.driver import Attribute, CudaDriver, DeviceFacts, Driver, DriverFacts
from gracetune.hardware.files import HostFiles
from gracetune.hardware.host import ProcessFacts, read_host, read_pcie_link
from gracetune.hardware.machine import DriverReport, Gpu, GpuAttributes, Host, Machine, NumaNode, Software
from gracetune.hardware.profile import choose_memory_mode, choose_profile, coherent_link
from gracetune.hardware.software import read_software

_NUMA_NODE_CONFIG = 1  # CU_DEVICE_NUMA_CONFIG_NUMA_NODE


def probe(
    root: Path = Path("/"),
    driver: Driver | None = None,
    *,
    process: ProcessFacts | None = None,
    software: Software | None = None,
    free_memory: bool = False,
) -> Machine:
    """Describe this machine. The arguments replace its four sources; a recording passes all of them.

    With `free_memory`, each GPU is opened to query its free memory. This takes a fraction of a second, and a few
    hundred MiB of GPU memory.
    """
    return assemble(
        HostFiles(root),
        (driver or CudaDriver()).facts(free_memory=free_memory),
        process or ProcessFacts.of_this_process(),
        software or read_software(),
    )


def assemble(files: HostFiles, driver: DriverFacts, process: ProcessFacts, software: Software) -> Machine:
    """Combine the four sources into a Machine. Pure, except for reading `files`."""
    gpus = tuple(_gpu(files, index, facts) for index, facts in enumerate(driver.devices))
    host = _without_gpu_memory(read_host(files, process), gpus)
    return Machine(
        profile=choose_profile(host, gpus),
        memory_mode=choose_memory_mode(host, gpus),
        host=host,
        gpus=gpus,
        driver=DriverReport(
            status=driver.status,
            detail=driver.detail,
            error_code=driver.error_code,
            cuda_version=_cuda_version(driver.cuda_version),
        ),
        software=software,
    )


def read_host_memory(gpus: tuple[Gpu, ...], root: Path = Path("/")) -> Host:
    """Probe the host only. Long operations call this repeatedly to watch main memory."""
    return _without_gpu_memory(read_host(HostFiles(root), ProcessFacts()), gpus)


def _gpu(files: HostFiles, index: int, facts: DeviceFacts) -> Gpu:
    attributes = _attributes(facts)
    address = _pci_address(facts)
    config = facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_NUMA_CONFIG)
    is_node = None if config is None else config == _NUMA_NODE_CONFIG
    return Gpu(
        index=index,
        name=facts.name,
        compute_capability=_compute_capability(facts),
        multiprocessors=facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        memory_total=facts.memory_total,
        memory_free=facts.memory_free,
        attributes=attributes,
        is_numa_node=is_node,
        numa_node=_node(facts, Attribute.CU_DEVICE_ATTRIBUTE_NUMA_ID) if is_node else None,
        host_numa_node=_node(facts, Attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID),
        pci_address=address,
        pcie=read_pcie_link(files, address) if address else None,
        coherent_link=coherent_link(attributes),
        context_error=facts.context_error,
    )


def _attributes(facts: DeviceFacts) -> GpuAttributes:
    def flag(which: Attribute) -> bool | None:
        value = facts.attribute(which)
        return None if value is None else value != 0

    return GpuAttributes(
        managed_memory=flag(Attribute.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
        concurrent_managed_access=flag(Attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS),
        pageable_memory_access=flag(Attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
        pageable_uses_host_page_tables=flag(Attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES),
        direct_managed_access_from_host=flag(Attribute.CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST),
        host_native_atomic=flag(Attribute.CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED),
        integrated=flag(Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED),
        can_map_host_memory=flag(Attribute.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
    )


def _node(facts: DeviceFacts, which: Attribute) -> int | None:
    node = facts.attribute(which)
    return node if node is not None and node >= 0 else None


def _compute_capability(facts: DeviceFacts) -> str | None:
    major = facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return None if major is None or minor is None else f"{major}.{minor}"


def _pci_address(facts: DeviceFacts) -> str | None:
    """The PCI address in the spelling of sysfs. A GPU is function 0 of its device."""
    domain = facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)
    bus = facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)
    device = facts.attribute(Attribute.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _cuda_version(number: int | None) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _without_gpu_memory(host: Host, gpus: tuple[Gpu, ...]) -> Host:
    """Mark the NUMA nodes that are GPU memory, and subtract them from main memory.

    In NUMA mode, MemTotal and MemAvailable include GPU memory (HBM). Host caches planned with those values would take
    the memory that they are supposed to save. Nodes of unknown kind are subtracted too, to be safe.
    """
    nodes = tuple(node.model_copy(update={"is_gpu_memory": _is_gpu_memory(node, gpus)}) for node in host.numa_nodes)
    foreign = [node for node in nodes if node.is_gpu_memory is not False]
    return host.model_copy(
        update={
            "numa_nodes": nodes,
            "cpu_mem_total": _minus(host.mem_total, [node.memory_total for node in foreign]),
            "cpu_mem_available": _minus(
                host.mem_available, [part for node in foreign for part in (node.memory_free, node.page_cache)]
            ),
        }
    )


def _is_gpu_memory(node: NumaNode, gpus: tuple[Gpu, ...]) -> bool | None:
    if any(node.id == gpu.numa_node for gpu in gpus):
        return True
    if node.cpu_count > 0 or not node.memory_total:
        return False  # ordinary memory, or one of the empty nodes that are reserved for MIG instances
    # Memory without CPUs that belongs to no GPU is CXL or persistent memory, unless a GPU did not report its node.
    return None if any(gpu.is_numa_node is None and gpu.coherent_link is not False for gpu in gpus) else False


def _minus(total: int | None, parts: list[int | None]) -> int | None:
    return None if total is None else max(0, total - sum(part or 0 for part in parts))
