"""The description of a machine as frozen data. `None` means unknown unless a field says otherwise; no
value is guessed. Sizes are in bytes.

A Machine survives a round trip through JSON: the doctor's JSON contains it under the key "machine", and
`gracetune estimate --machine` reads it. Serial numbers and GPU UUIDs are left out deliberately: they are not needed,
and users paste these reports into public issues.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ProfileName = Literal["superchip", "integrated", "discrete", "cpu"]
MemoryModeName = Literal["coherent NUMA", "coherent CDMM", "integrated one-pool", "discrete", "none", "unknown"]


class FrozenFacts(BaseModel):
    """Base class: frozen, and rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NumaNode(FrozenFacts):
    """One NUMA node of the kernel. On a GH200 in NUMA mode, the GPU's memory is a node without CPUs."""

    id: int
    cpus: str
    cpu_count: int
    memory_total: int | None = None
    memory_free: int | None = None
    page_cache: int | None = None
    is_gpu_memory: bool | None = None


class Cgroup(FrozenFacts):
    """The memory limit of this process: the lowest one between its control group and the root."""

    version: Literal[1, 2]
    limit: int | None = None
    """Bytes; None if there is no limit. (If the group cannot be read, there is no `Cgroup`.)"""
    throttle: int | None = None
    """The lowest `memory.high` on the path (version 2). Above it the kernel slows the process down."""
    current: int | None = None
    """Bytes in use in the group with the limit, including page cache."""
    available: int | None = None
    """Bytes that this process can still allocate; reclaimable page cache counts as free. None without a limit."""


class Host(FrozenFacts):
    """CPU, operating system and main memory."""

    architecture: str | None = None
    kernel: str | None = None
    cpu_model: str | None = None
    cpu_count: int | None = None
    """Number of CPUs that this process may use."""
    page_size: int | None = None
    mem_total: int | None = None
    mem_available: int | None = None
    cpu_mem_total: int | None = None
    """`mem_total` without the GPU memory that NUMA mode adds to it."""
    cpu_mem_available: int | None = None
    """`mem_available` without the free part of that GPU memory."""
    swap_total: int | None = None
    memlock_limit: int | Literal["unlimited"] | None = None
    transparent_huge_pages: str | None = None
    numa_balancing: int | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    cgroup: Cgroup | None = None
    container: str | None = None
    """"docker" or "podman" if a marker file exists. None does not mean that there is no container."""
    nvidia_pci_devices: int | None = None
    """Number of NVIDIA display or compute devices on the PCI bus, with or without a driver."""
    nvidia_kernel_driver: str | None = None
    """Version of the loaded kernel module, such as "580.95.05"."""
    coherent_memory_parameter: str | None = None
    """`CoherentGPUMemoryMode` of the kernel module: "driver", "numa", or "" if it is not set."""
    user_numa_management: int | None = None
    """`EnableUserNUMAManagement` of the kernel module. On a coherent machine, 0 indicates CDMM."""

    @property
    def headroom(self) -> int | None:
        """Main memory that this process can still allocate: MemAvailable without GPU memory, limited by the cgroup.

        If one of the two is unknown, the other one counts; None if both are.
        """
        known = [self.cpu_mem_available, self.cgroup.available if self.cgroup else None]
        return min((value for value in known if value is not None), default=None)

    @property
    def memory_limit(self) -> int | None:
        """The maximum main memory of this process: the installed memory, or the cgroup's limit if that is lower."""
        known = [self.cpu_mem_total, self.cgroup.limit if self.cgroup else None]
        return min((value for value in known if value is not None), default=None)


class GpuAttributes(FrozenFacts):
    """The GPU's memory capabilities according to the driver. The names follow `CUdevice_attribute`."""

    managed_memory: bool | None = None
    concurrent_managed_access: bool | None = None
    pageable_memory_access: bool | None = None
    pageable_uses_host_page_tables: bool | None = None
    direct_managed_access_from_host: bool | None = None
    host_native_atomic: bool | None = None
    integrated: bool | None = None
    can_map_host_memory: bool | None = None


class PcieLink(FrozenFacts):
    """The PCIe link according to sysfs. The speed is lower while a GPU is idle; the width is not."""

    speed_gts: float | None = None
    width: int | None = None
    max_speed_gts: float | None = None
    max_width: int | None = None


class Gpu(FrozenFacts):
    """One GPU. The order is that of the driver, which applies `CUDA_VISIBLE_DEVICES`."""

    index: int
    name: str | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    attributes: GpuAttributes = GpuAttributes()
    numa_node: int | None = None
    """The NUMA node of its memory, if the operating system manages that memory."""
    is_numa_node: bool | None = None
    host_numa_node: int | None = None
    pci_address: str | None = None
    pcie: PcieLink | None = None
    coherent_link: bool | None = None
    """Whether CPU and GPU access each other's memory coherently over the link (for example NVLink-C2C)."""
    context_error: str | None = None
    """Why the driver could not open this GPU; None if it could or was not tried."""


class DriverReport(FrozenFacts):
    """The CUDA user-space driver (libcuda)."""

    status: Literal["ok", "absent", "failed"]
    detail: str
    """"ok", or the message of the loader or of `cuInit`."""
    error_code: int | None = None
    cuda_version: str | None = None


class Software(FrozenFacts):
    """Versions, read without importing anything heavy."""

    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """The CUDA version that torch was built for; None without CUDA or without torch."""
    torch_hip: str | None = None
    libraries: dict[str, str | None] = Field(default_factory=dict)
    """Versions by distribution name; None if not installed."""


class MemoryMode(FrozenFacts):
    """The relation between CPU and GPU memory, and the evidence for it."""

    value: MemoryModeName
    reason: str


class Profile(FrozenFacts):
    """The kind of machine, and the evidence for it."""

    value: ProfileName
    reason: str


class Machine(FrozenFacts):
    """The complete description of a machine, the input of plans and checks."""

    format: Literal[1] = 1
    profile: Profile
    memory_mode: MemoryMode
    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: DriverReport
    software: Software
