"""The probe: describes the machine as a frozen `Machine`, from the driver, `/proc`, `/sys` and installed software.

The kind of machine is derived from attributes that the driver reports, never from a product name.

Coherence. Each of three driver attributes means that CPU and GPU access each other's memory coherently over the link:
- PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: the GPU walks the CPU's page tables (ATS). According to the CUDA
  programming guide, this identifies a hardware-coherent system.
- DIRECT_MANAGED_MEM_ACCESS_FROM_HOST: the CPU reads managed memory in GPU memory without migration.
- HOST_NATIVE_ATOMIC_SUPPORTED: all native atomics work over the link; PCIe supports only some of them.
GH200 and GB200 have the link in both memory modes, so one of the three suffices. In CDMM mode, the first should stay 1
according to NVIDIA's documentation ("the GPU can still access system memory over C2C") and the driver source (ATS is
enabled independently of CDMM). No recording confirms this yet; if it is 0, the other two attributes still apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gracetune.hardware.driver import Attribute, CudaDriver, DeviceFacts, Driver, DriverFacts
from gracetune.hardware.files import HostFiles
from gracetune.hardware.host import ProcessFacts, read_host, read_pcie_link
from gracetune.hardware.machine import (
    DriverReport,
    Gpu,
    GpuAttributes,
    Host,
    Machine,
    MemoryMode,
    NumaNode,
    Profile,
    Software,
)
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
    """Whether a NUMA node is a GPU's memory; None if unknown."""
    if any(node.id == gpu.numa_node for gpu in gpus):
        return True
    if node.cpu_count > 0 or not node.memory_total:
        return False  # ordinary memory, or one of the empty nodes that are reserved for MIG instances
    # Memory without CPUs that belongs to no GPU is CXL or persistent memory, unless a GPU did not report its node.
    return None if any(gpu.is_numa_node is None and gpu.coherent_link is not False for gpu in gpus) else False


def _minus(total: int | None, parts: list[int | None]) -> int | None:
    return None if total is None else max(0, total - sum(part or 0 for part in parts))


# -- the kind of machine -----------------------------------------------------------------------------------------------


_COHERENT_SIGNS = {
    "pageable_uses_host_page_tables": "the GPU walks the CPU's page tables (ATS)",
    "direct_managed_access_from_host": "the CPU reads managed memory where it lies",
    "host_native_atomic": "all native atomics work across it",
}


def coherent_link(attributes: GpuAttributes) -> bool | None:
    """True if any of the attributes is set, False if the driver reports all of them as 0, else None (unknown)."""
    signs = _signs(attributes)
    if any(signs.values()):
        return True
    return False if all(value is False for value in signs.values()) else None


def _signs(attributes: GpuAttributes) -> dict[str, bool | None]:
    return {
        "pageable_uses_host_page_tables": attributes.pageable_uses_host_page_tables,
        "direct_managed_access_from_host": attributes.direct_managed_access_from_host,
        "host_native_atomic": attributes.host_native_atomic,
    }


def _sign(attributes: GpuAttributes) -> str:
    return next(_COHERENT_SIGNS[name] for name, value in _signs(attributes).items() if value)


def choose_profile(host: Host, gpus: Sequence[Gpu]) -> Profile:
    """Choose the profile by the first GPU, which is the one that a run uses by default."""
    if not gpus:
        return Profile(value="cpu", reason="no usable CUDA GPU")
    first = gpus[0]
    attributes = first.attributes
    if attributes.integrated:
        return Profile(value="integrated", reason="the driver says that the GPU shares the CPU's memory")
    if attributes.integrated is None:
        return Profile(value="discrete", reason="the driver does not say what kind of GPU this is: taken as discrete")
    link = coherent_link(attributes)
    if link:
        return Profile(value="superchip", reason=f"coherent link, {_sign(attributes)}{_mode_note(host, first)}")
    if link is False:
        return Profile(value="discrete", reason="own GPU memory, and the driver reports no coherent link to it")
    return Profile(value="discrete", reason="the driver does not say whether the link is coherent: taken as discrete")


def _mode_note(host: Host, gpu: Gpu) -> str:
    mode = _coherent_mode(host, gpu)
    return f"; mode {mode.value}" if mode.value != "unknown" else ""


def choose_memory_mode(host: Host, gpus: Sequence[Gpu]) -> MemoryMode:
    if not gpus:
        return MemoryMode(value="none", reason="no usable CUDA GPU, so there is only main memory")
    first = gpus[0]
    if first.attributes.integrated:
        return MemoryMode(value="integrated one-pool", reason="CPU and GPU allocate from the same memory chips")
    if first.attributes.integrated is None:
        return MemoryMode(value="unknown", reason="the driver does not say whether the GPU has memory of its own")
    link = coherent_link(first.attributes)
    if link is None:
        return MemoryMode(value="unknown", reason="the driver does not say whether the link is coherent")
    if not link:
        return MemoryMode(value="discrete", reason="two memories, no coherent link between them")
    return _coherent_mode(host, first)


def _coherent_mode(host: Host, gpu: Gpu) -> MemoryMode:
    """NUMA or CDMM mode of a GPU with a coherent link.

    The sources are, in this order, the driver (NUMA_CONFIG) and the parameters of the kernel module. Since driver 615,
    CDMM is the default without a parameter; then EnableUserNUMAManagement = 0 indicates it.
    """
    if gpu.is_numa_node:
        location = "" if gpu.numa_node is None else f" (node {gpu.numa_node})"
        return MemoryMode(value="coherent NUMA", reason=f"the kernel manages the GPU's memory as a NUMA node{location}")
    if gpu.is_numa_node is False:
        return MemoryMode(value="coherent CDMM", reason="the driver keeps the GPU's memory, it is no NUMA node")
    if host.coherent_memory_parameter == "driver":
        return MemoryMode(value="coherent CDMM", reason='the kernel module runs with CoherentGPUMemoryMode="driver"')
    if host.coherent_memory_parameter == "numa":
        return MemoryMode(value="coherent NUMA", reason='the kernel module runs with CoherentGPUMemoryMode="numa"')
    if host.user_numa_management == 0:
        return MemoryMode(value="coherent CDMM", reason="the kernel module runs with EnableUserNUMAManagement=0")
    return MemoryMode(value="unknown", reason="coherent, but neither driver nor kernel module says NUMA or CDMM")
