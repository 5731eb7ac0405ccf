"""The kind of machine, derived from attributes that the driver reports, never from a product name.

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

from gracetune.hardware.machine import Gpu, GpuAttributes, Host, MemoryMode, Profile

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
