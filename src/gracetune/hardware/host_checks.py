"""Checks of main memory, kernel settings, software and unified-memory settings."""

from __future__ import annotations

from gracetune.hardware.allocation import CAREFUL_CAP, host_reserve
from gracetune.hardware.check import Check, Examination
from gracetune.hardware.software import MINIMUM_TORCH, at_least
from gracetune.units import GIB, KIB, MIB, format_bytes


def torch(exam: Examination) -> Check:
    software = exam.machine.software
    install = f"pip install 'torch>={MINIMUM_TORCH}'"
    if software.torch is None:
        return Check("torch", "fail", "torch is not installed", install)
    if not at_least(software.torch, MINIMUM_TORCH):
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
    return version is not None and not at_least(version, minimum)


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
    """Warn about swap on one-pool machines: GPU pages cannot be swapped, so all else is, and the machine hangs."""
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
    """Warn about huge pages that waste memory: with 64 KiB base pages, one transparent huge page is 512 MiB."""
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


def allocation(exam: Examination) -> Check | None:
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
