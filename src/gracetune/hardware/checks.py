"""The checks of the doctor: GPUs and their driver, main memory, kernel settings, software, unified-memory settings.

Each function takes an `Examination` and returns a `Check`, or None if the check does not apply to the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gracetune.errors import Problem
from gracetune.hardware.allocation import CAREFUL_CAP, AllocationResult, host_reserve
from gracetune.hardware.driver import CUDA_ERROR_NO_DEVICE
from gracetune.hardware.machine import Gpu, Machine
from gracetune.hardware.software import MINIMUM_TORCH, is_at_least, release_numbers
from gracetune.units import GIB, KIB, MIB, format_bytes

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
    """Minimum versions by library; empty if gracetune is not installed."""
    visible_devices: str | None = None
    """The value of `CUDA_VISIBLE_DEVICES` if it is set."""


# -- GPUs, their driver and their memory -------------------------------------------------------------------------------


# Remedies for known errors of `cuInit`, by CUresult value of cuda.h.
_INIT_REMEDIES = {
    34: "this libcuda is the toolkit's stub: remove the stubs folder from LD_LIBRARY_PATH",
    100: "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container start it with GPU access (--gpus all)",
    802: "the NVLink fabric is not up yet: check the services nvidia-fabricmanager and nvidia-imex",
    803: "libcuda and the kernel module differ in version: reboot after a driver update, or rebuild the container",
    804: "remove the cuda-compat package: this GPU does not support running a newer libcuda on an older driver",
    999: "try: sudo nvidia-modprobe -u -c=0 ; then look at: sudo dmesg | grep -i nvrm",
}
_HIDDEN = ("", "-1", "none", "NoDevFiles")


def gpu(exam: Examination) -> Check:
    gpus = exam.machine.gpus
    if gpus:
        names = ", ".join(f"{one.name or 'unnamed GPU'} ({_size(one.memory_total)})" for one in gpus)
        return Check("gpu", "ok", f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {names}")
    on_bus = exam.machine.host.nvidia_pci_devices or 0
    seen = f"; {on_bus} NVIDIA device(s) on the PCI bus" if on_bus else ""
    if exam.require_gpu:
        return Check("gpu", "fail", f"no usable GPU, but --require-gpu is set{seen}", _get_a_gpu(on_bus))
    works = "Available: config, estimate, data, demo, and doctor with recordings of other machines"
    fails = "Not available: unified memory and the GPU parts of bench; training needs a machine with a GPU"
    return Check("gpu", "warn", f"no usable GPU{seen}. {works}. {fails}.", _get_a_gpu(on_bus))


def _get_a_gpu(on_bus: int) -> str:
    if on_bus:
        return "install the NVIDIA driver, or give this container access to the GPU (docker run --gpus all)"
    return "nothing to do for these commands; train on a machine with an NVIDIA GPU"


def driver(exam: Examination) -> Check:
    report, host = exam.machine.driver, exam.machine.host
    if report.status == "ok":
        kernel = f"kernel module {host.nvidia_kernel_driver}, " if host.nvidia_kernel_driver else ""
        return Check("driver", "ok", f"{kernel}CUDA {report.cuda_version or 'version unknown'}")
    if report.status == "absent" and host.nvidia_kernel_driver:
        finding = f"kernel module {host.nvidia_kernel_driver} is loaded, but: {report.detail}"
        return Check("driver", "warn", finding, "give this container the GPU (docker run --gpus all, apptainer --nv)")
    if report.status == "absent":
        return Check("driver", "ok", f"none installed ({report.detail})")
    return _failed_driver(exam)


def _failed_driver(exam: Examination) -> Check:
    report, host = exam.machine.driver, exam.machine.host
    remedy = _INIT_REMEDIES.get(report.error_code or 0, "run nvidia-smi, and look at: sudo dmesg | grep -i nvrm")
    if report.error_code == CUDA_ERROR_NO_DEVICE:
        if exam.visible_devices is not None and exam.visible_devices.strip() in _HIDDEN:
            finding = f"CUDA_VISIBLE_DEVICES={exam.visible_devices!r} hides every GPU"
            return Check("driver", "warn", finding, "unset CUDA_VISIBLE_DEVICES")
        if not host.nvidia_pci_devices and not host.nvidia_kernel_driver:
            return Check("driver", "warn", f"installed, but finds no GPU ({report.detail})", remedy)
    return Check("driver", "fail", f"installed, but unusable: {report.detail}", remedy)


def driver_cuda(exam: Examination) -> Check | None:
    """Compare the CUDA versions of driver and torch.

    Within a major version, torch runs on a driver with an older minor version, except kernels compiled from PTX.
    """
    has, needs = exam.machine.driver.cuda_version, exam.machine.software.torch_cuda
    if not exam.machine.gpus or needs is None:
        return None
    if has is None:
        return Check("driver_cuda", "warn", "the driver does not report its CUDA version", "run nvidia-smi")
    driver_version, torch_version = release_numbers(has)[:2], release_numbers(needs)[:2]
    if driver_version >= torch_version:
        return Check("driver_cuda", "ok", f"driver CUDA {has} runs torch built for CUDA {needs}")
    remedy = f"install a driver for CUDA {needs} or later, or a torch built for CUDA {has}"
    if driver_version[:1] == torch_version[:1]:
        finding = f"driver CUDA {has} is older than torch's {needs}: runs, but code that compiles kernels may not"
        return Check("driver_cuda", "warn", finding, remedy)
    return Check("driver_cuda", "fail", f"driver CUDA {has} cannot run torch built for CUDA {needs}", remedy)


def gpu_memory(exam: Examination) -> Check | None:
    """Check that the GPUs can be opened and that their memory is free."""
    machine = exam.machine
    broken = [one for one in machine.gpus if one.context_error]
    if broken:
        finding = "; ".join(f"GPU {one.index} cannot be opened: {one.context_error}" for one in broken)
        remedy = "list processes that use it: nvidia-smi ; reset the compute mode: nvidia-smi -c 0"
        return Check("gpu_memory", "fail", finding, remedy)
    measured = [one for one in machine.gpus if one.memory_free is not None and one.memory_total]
    if not measured:
        return None
    occupied = [one for one in measured if (one.memory_free or 0) < 0.9 * (one.memory_total or 0)]
    if not occupied:
        return Check("gpu_memory", "ok", f"{', '.join(map(_free_of, measured))} free")
    return _occupied(exam, occupied)


def _occupied(exam: Examination, occupied: list[Gpu]) -> Check:
    finding = f"only {', '.join(map(_free_of, occupied))} free"
    nodes = {one.numa_node for one in occupied if one.numa_node is not None}
    cached = sum(node.page_cache or 0 for node in exam.machine.host.numa_nodes if node.id in nodes)
    if cached > GIB:
        # In NUMA mode the kernel may place page cache in GPU memory. CUDA counts it as used, but it is reclaimable.
        finding += f"; {format_bytes(cached)} of GPU memory contain the kernel's page cache"
        return Check("gpu_memory", "warn", finding, "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches")
    return Check("gpu_memory", "warn", finding, "stop processes that use it: nvidia-smi lists them")


def _free_of(one: Gpu) -> str:
    return f"GPU {one.index}: {_size(one.memory_free)} of {_size(one.memory_total)}"


def memory_mode(exam: Examination) -> Check | None:
    if not exam.machine.gpus:
        return None
    mode = exam.machine.memory_mode
    finding = f"{mode.value}: {mode.reason}. {_MEANS[mode.value]}"
    if mode.value == "unknown":
        return Check(
            "memory_mode", "warn", finding, "please report it with the output of: gracetune doctor --record DIR"
        )
    return Check("memory_mode", "ok", finding)


_MEANS = {
    "coherent NUMA": "Overflow and caches are in CPU memory, which the GPU accesses over the coherent link",
    "coherent CDMM": "The same as NUMA mode for gracetune, which uses managed memory; malloc'd memory stays on the CPU",
    "integrated one-pool": "CPU and GPU share one memory, so nothing is copied; watch MemAvailable, not nvidia-smi",
    "discrete": "Caches are pinned and copied ahead; managed memory is limited to 4 GiB unless forced",
    "unknown": "Treated as a discrete GPU, which is safe but slower",
    "none": "",
}


def managed_memory(exam: Examination) -> Check | None:
    if not exam.machine.gpus:
        return None
    attributes = exam.machine.gpus[0].attributes
    if attributes.managed_memory and attributes.concurrent_managed_access:
        return Check("managed_memory", "ok", "the GPU and the CPU can use managed memory at the same time")
    what = "managed memory" if not attributes.managed_memory else "concurrent access to managed memory"
    value = attributes.managed_memory if not attributes.managed_memory else attributes.concurrent_managed_access
    support = "does not support" if value is False else "does not report whether it supports"
    finding = f"the driver {support} {what}: no overflow arena, and caches are pinned and copied"
    if exam.uvm is not None and exam.uvm.enabled:
        remedy = "remove use_uvm and GH200_UVM_* from the environment, or use a system that supports it (bare Linux)"
        return Check("managed_memory", "fail", f"{finding}; but use_uvm is set", remedy)
    return Check("managed_memory", "warn", finding, "virtual GPUs and WSL lack it; a bare Linux driver supports it")


def mixed_gpus(exam: Examination) -> Check | None:
    gpus = exam.machine.gpus
    kinds = {(one.coherent_link, one.attributes.integrated) for one in gpus}
    if len(kinds) <= 1:
        return None
    finding = f"the {len(gpus)} GPUs access main memory in different ways; the profile is that of GPU 0"
    return Check("mixed_gpus", "warn", finding, "select one with CUDA_VISIBLE_DEVICES=0 (or another index)")


def link(exam: Examination) -> Check | None:
    if exam.machine.profile.value != "discrete":
        return None
    narrow = [
        f"GPU {one.index} runs on {one.pcie.width} of {one.pcie.max_width} PCIe lanes"
        for one in exam.machine.gpus
        if one.pcie and one.pcie.width and one.pcie.max_width and one.pcie.width < one.pcie.max_width
    ]
    if narrow:
        return Check("link", "warn", "; ".join(narrow), "use a slot with all lanes, because offloading needs them")
    known = [one.pcie for one in exam.machine.gpus if one.pcie and one.pcie.width]
    if not known:
        return None
    speed = f" at up to {known[0].max_speed_gts:g} GT/s" if known[0].max_speed_gts else ""
    return Check("link", "ok", f"PCIe, {known[0].width} lanes{speed}")


def _size(count: int | None) -> str:
    return "unknown size" if count is None else format_bytes(count)


# -- main memory, kernel and software ----------------------------------------------------------------------------------


def torch(exam: Examination) -> Check:
    software = exam.machine.software
    install = f"pip install 'torch>={MINIMUM_TORCH}'"
    if software.torch is None:
        return Check("torch", "fail", "torch is not installed", install)
    if not is_at_least(software.torch, MINIMUM_TORCH):
        return Check("torch", "fail", f"torch {software.torch} is too old, {MINIMUM_TORCH} is the oldest", install)
    if exam.machine.gpus and software.torch_cuda is None:
        return Check("torch", "fail", f"torch {software.torch} has no CUDA, but there is a GPU", _cuda_torch(exam))
    build = f"built for CUDA {software.torch_cuda}" if software.torch_cuda else "CPU build"
    return Check("torch", "ok", f"torch {software.torch}, {build}")


def _cuda_torch(exam: Examination) -> str:
    version = exam.machine.driver.cuda_version
    supports = f" (the driver supports up to CUDA {version})" if version else ""
    return f"pip uninstall -y torch, then install the CUDA build that pytorch.org names for your system{supports}"


def libraries(exam: Examination) -> Check:
    installed = exam.machine.software.libraries
    if not exam.minimums:
        return Check("libraries", "ok", "not compared: gracetune is not installed, so its requirements are unknown")
    wanted = {name: minimum for name, minimum in exam.minimums.items() if name != "torch" and name in installed}
    missing = [name for name in wanted if installed[name] is None]
    old = [f"{name} {installed[name]}" for name, minimum in wanted.items() if _older(installed[name], minimum)]
    if not missing and not old:
        return Check("libraries", "ok", f"{len(wanted)} required libraries are installed and recent enough")
    parts = [f"missing: {', '.join(missing)}"] if missing else []
    parts += [f"too old: {', '.join(old)}"] if old else []
    affected = [name for name, minimum in wanted.items() if name in missing or _older(installed[name], minimum)]
    upgrade = " ".join(f"'{name}>={wanted[name]}'" for name in affected)
    return Check("libraries", "fail", "; ".join(parts), f"pip install -U {upgrade}")


def _older(version: str | None, minimum: str) -> bool:
    return version is not None and not is_at_least(version, minimum)


def host_memory(exam: Examination) -> Check:
    host = exam.machine.host
    headroom, reserve = host.headroom, host_reserve(exam.machine)
    if headroom is None:
        return Check("host_memory", "warn", "it is unknown how much main memory is free", "run: free -h")
    of_total = f" of {format_bytes(host.memory_limit)}" if host.memory_limit else ""
    finding = f"{format_bytes(headroom)}{of_total} available"
    if host.cpu_mem_total != host.mem_total and host.mem_total is not None:
        finding += f" (the kernel's {format_bytes(host.mem_total)} include GPU memory)"
    if headroom < reserve:
        finding += f", less than the reserve of {format_bytes(reserve)}"
        return Check("host_memory", "warn", finding, "stop processes that use it: ps aux --sort=-rss | head")
    return Check("host_memory", "ok", finding)


def cgroup(exam: Examination) -> Check | None:
    host = exam.machine.host
    if host.cgroup is None:
        return Check("cgroup", "warn", "the memory limit of this process is unknown", "run: cat /proc/self/cgroup")
    limit, total = host.cgroup.limit, host.cpu_mem_total
    throttle = host.cgroup.throttle
    if throttle is not None and (limit is None or throttle < limit):
        finding = f"the kernel slows this process down above {format_bytes(throttle)} (memory.high)"
        return Check("cgroup", "warn", finding, "raise MemoryHigh of the service or the job's memory request")
    if limit is None or (total is not None and limit >= total):
        return Check("cgroup", "ok", "no limit below the machine's memory")
    of_total = f" of the machine's {format_bytes(total)}" if total is not None else ""
    finding = f"limited to {format_bytes(limit)}{of_total}: the kernel kills the run above that, plans respect it"
    remedy = "ask for more memory: docker run --memory=..., sbatch --mem=..., or the pod's memory limit"
    return Check("cgroup", "warn", finding, remedy)


def pinned_memory(exam: Examination) -> Check | None:
    """Check the locked-memory limit. mlock and RDMA are subject to it, pages pinned by the CUDA driver are not."""
    limit = exam.machine.host.memlock_limit
    if not exam.machine.gpus or limit is None:
        return None
    if limit == "unlimited" or limit >= 64 * MIB or len(exam.machine.gpus) == 1:
        shown = limit if isinstance(limit, str) else format_bytes(limit)
        return Check("pinned_memory", "ok", f"locked-memory limit {shown}; CUDA's pinned memory is not subject to it")
    finding = f"locked-memory limit {format_bytes(limit)}: sufficient for CUDA, too low for RDMA between machines"
    return Check("pinned_memory", "warn", finding, "ulimit -l unlimited (docker run --ulimit memlock=-1)")


def swap(exam: Examination) -> Check | None:
    """Warn about swap on one-pool machines. GPU pages cannot be swapped: everything else is, and the machine hangs."""
    if exam.machine.profile.value != "integrated" or exam.machine.host.swap_total is None:
        return None
    total = exam.machine.host.swap_total
    if total == 0:
        return Check("swap", "ok", "no swap: a run that needs too much memory is killed instead of hanging the machine")
    finding = f"{format_bytes(total)} of swap: with one pool, running out of memory hangs the machine for minutes"
    return Check("swap", "warn", finding, "sudo swapoff -a")


def numa_balancing(exam: Examination) -> Check | None:
    value = exam.machine.host.numa_balancing
    if exam.machine.profile.value != "superchip" or value is None:
        return None
    if value == 0:
        return Check("numa_balancing", "ok", "off")
    finding = "on: the kernel repeatedly unmaps pages to track their use, and a GPU that accesses one must wait"
    return Check("numa_balancing", "warn", finding, "sudo sysctl -w kernel.numa_balancing=0")


def page_size(exam: Examination) -> Check | None:
    size = exam.machine.host.page_size
    if exam.machine.profile.value != "superchip" or size is None:
        return None
    if size >= 64 * KIB:
        return Check("page_size", "ok", f"{size // KIB} KiB")
    finding = f"{size // KIB} KiB: works, but NVIDIA recommends a 64 KiB kernel for Grace (fewer faults, less TLB)"
    return Check("page_size", "warn", finding, "boot the -64k kernel if you may; on a rented machine leave it")


def huge_pages(exam: Examination) -> Check | None:
    """Warn about huge pages that waste memory (512 MiB each with 64 KiB base pages), or cost TLB misses if off."""
    host = exam.machine.host
    if exam.machine.profile.value != "superchip" or host.transparent_huge_pages is None:
        return None
    mode, large = host.transparent_huge_pages, (host.page_size or 0) >= 64 * KIB
    if mode == "always" and large:
        finding = "transparent huge pages are always on: with 64 KiB pages each takes 512 MiB, which wastes memory"
    elif mode == "never" and not large:
        finding = "transparent huge pages are off with 4 KiB pages: host caches cause more TLB misses"
    else:
        return Check("huge_pages", "ok", f"transparent huge pages: {mode}")
    return Check("huge_pages", "warn", finding, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")


def uvm(exam: Examination) -> Check | None:
    settings = exam.uvm
    if settings is None:
        return None
    if settings.problems:
        finding = "; ".join(f"{each.key}: found {each.found}, expected {each.expected}" for each in settings.problems)
        return Check("uvm", "fail", finding, "; ".join(dict.fromkeys(each.hint for each in settings.problems)))
    if not settings.enabled:
        return Check("uvm", "ok", "not enabled in the environment (the config of a run can enable it)")
    if not exam.machine.gpus:
        return Check("uvm", "warn", "use_uvm is set, but there is no GPU, so it has no effect", "nothing to do")
    ratio = settings.oversubscription_ratio
    finding = f"use_uvm, ratio {ratio:g}" if ratio is not None else "use_uvm, default ratio"
    finding += f", {settings.access_pattern}" if settings.access_pattern else ""
    if exam.machine.profile.value == "superchip":
        return Check("uvm", "ok", finding)
    if exam.machine.profile.value == "integrated":
        finding += ": CPU and GPU share one pool, so there is no memory to overflow into"
        return Check("uvm", "warn", finding, "unset use_uvm")
    capped = f"{finding}: without a coherent link, managed memory is limited to {format_bytes(CAREFUL_CAP)}"
    return Check("uvm", "warn", capped, "unset use_uvm: offloading by pinned copies is faster on this machine")


def uvm_policy(exam: Examination) -> Check | None:
    if exam.uvm is None or exam.uvm.access_pattern != "gpu_first":
        return None
    finding = "gpu_first disables the driver's thrashing protection, the slowest policy when memory really overflows"
    return Check("uvm_policy", "warn", finding, "set uvm_access_pattern:cpu_first, or remove it")


def allocation(exam: Examination) -> Check:
    result = exam.allocation
    if result.status == "failed":
        remedy = "run with --skip-allocation to see the other checks; nvidia-smi lists processes that use the GPU"
        return Check("allocation", "fail", f"managed memory: {result.error}", remedy)
    if result.status == "skipped":
        return Check("allocation", "ok", f"skipped: {result.reason}")
    rate = f", filled at {result.fill_rate / GIB:.1f} GiB/s" if result.fill_rate else ""
    finding = f"{format_bytes(result.allocated)} of managed memory written by the GPU, read by the CPU{rate}"
    if result.status == "reduced":
        finding += f" (less than requested: {result.reason})"
    return Check("allocation", "ok", finding)
