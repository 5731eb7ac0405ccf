"""What one machine is, as plain frozen data. `None` everywhere means unknown; nothing in here is ever guessed.

`Machine.model_validate_json(machine.model_dump_json())` is the identity: the doctor's JSON carries a Machine under
the key "machine", and `gracetune estimate --machine` reads it back. Serial numbers and GPU UUIDs are left out on
purpose: nothing needs them, and people paste these reports into public issues.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ProfileName = Literal["superchip", "integrated", "discrete", "cpu"]
MemoryModeName = Literal["coherent NUMA", "coherent CDMM", "integrated one-pool", "discrete", "none", "unknown"]


class Facts(BaseModel):
    """Frozen, and refusing every field it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NumaNode(Facts):
    """One memory node as the kernel sees it. On a GH200 in NUMA mode the HBM is such a node, without CPUs."""

    id: int
    cpus: str
    cpu_count: int
    memory_total: int | None = None
    memory_free: int | None = None
    page_cache: int | None = None
    is_gpu_memory: bool | None = None


class Cgroup(Facts):
    """The memory limit this process lives under: the tightest one between its own group and the root."""

    version: Literal[1, 2]
    limit: int | None = None
    """Bytes, or None for "no limit" (a group that cannot be read is no `Cgroup` at all)."""
    throttle: int | None = None
    """Smallest `memory.high` on the path (version 2): above it the kernel slows the process down."""
    current: int | None = None
    """Bytes in use in the group that carries the limit, page cache included."""
    available: int | None = None
    """Bytes this process can still take, reclaimable page cache counted as free; None without a limit."""


class Host(Facts):
    """CPU, operating system and main memory."""

    architecture: str | None = None
    kernel: str | None = None
    cpu_model: str | None = None
    cpu_count: int | None = None
    """CPUs this process may run on."""
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
    """"docker" or "podman" where a marker file says so; None does not prove the opposite."""
    nvidia_pci_devices: int | None = None
    """NVIDIA display or compute devices on the PCI bus, whether a driver drives them or not."""
    nvidia_kernel_driver: str | None = None
    """Version of the loaded kernel module, such as "580.95.05"."""
    coherent_memory_parameter: str | None = None
    """`CoherentGPUMemoryMode` of the kernel module: "driver", "numa", or "" where the administrator left it alone."""
    user_numa_management: int | None = None
    """`EnableUserNUMAManagement` of the kernel module; 0 is how CDMM looks on a coherent machine."""

    @property
    def headroom(self) -> int | None:
        """Bytes of main memory this process can still take: MemAvailable without GPU memory, and the cgroup."""
        known = [self.cpu_mem_available, self.cgroup.available if self.cgroup else None]
        return min((value for value in known if value is not None), default=None)

    @property
    def memory_limit(self) -> int | None:
        """The most main memory this process could ever have: installed, or the cgroup's limit where that is less."""
        known = [self.cpu_mem_total, self.cgroup.limit if self.cgroup else None]
        return min((value for value in known if value is not None), default=None)


class GpuAttributes(Facts):
    """What the driver says the GPU can do with memory; the names follow `CUdevice_attribute`."""

    managed_memory: bool | None = None
    concurrent_managed_access: bool | None = None
    pageable_memory_access: bool | None = None
    pageable_uses_host_page_tables: bool | None = None
    direct_managed_access_from_host: bool | None = None
    host_native_atomic: bool | None = None
    integrated: bool | None = None
    can_map_host_memory: bool | None = None


class PcieLink(Facts):
    """The PCIe link as sysfs reports it. The speed drops while a GPU idles; the width does not."""

    speed_gts: float | None = None
    width: int | None = None
    max_speed_gts: float | None = None
    max_width: int | None = None


class Gpu(Facts):
    """One GPU, in the driver's order (`CUDA_VISIBLE_DEVICES` has already been applied by the driver)."""

    index: int
    name: str | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    attributes: GpuAttributes = GpuAttributes()
    numa_node: int | None = None
    """The NUMA node its memory forms, where the operating system manages that memory."""
    is_numa_node: bool | None = None
    host_numa_node: int | None = None
    pci_address: str | None = None
    pcie: PcieLink | None = None
    coherent_link: bool | None = None
    """Whether CPU and GPU see each other's memory coherently over the link (NVLink-C2C and its like)."""
    context_error: str | None = None
    """Why the driver would not open this GPU for us, where it would not."""


class DriverReport(Facts):
    """The CUDA user-space driver (libcuda)."""

    status: Literal["ok", "absent", "failed"]
    detail: str
    """"ok", or what the loader or `cuInit` said."""
    error_code: int | None = None
    cuda_version: str | None = None


class Software(Facts):
    """Versions, read without importing anything heavy."""

    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA version torch was built for; None for a build without CUDA, and where torch is not installed."""
    torch_hip: str | None = None
    libraries: dict[str, str | None] = Field(default_factory=dict)
    """Distribution name -> version; None where it is not installed."""


class MemoryMode(Facts):
    """How CPU and GPU memory relate on this machine, and how we know."""

    value: MemoryModeName
    reason: str


class Profile(Facts):
    """Which of our four kinds of machine this is, and how we know."""

    value: ProfileName
    reason: str


class Machine(Facts):
    """Everything the rest of gracetune may know about the machine it runs on."""

    format: Literal[1] = 1
    profile: Profile
    memory_mode: MemoryMode
    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: DriverReport
    software: Software
