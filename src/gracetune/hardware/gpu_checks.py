"""Checks of the GPU, its driver and its memory.

Each function takes an `Examination` and returns a `Check`, or None if the check does not apply to the machine.
"""

from __future__ import annotations

from gracetune.hardware.check import Check, Examination
from gracetune.hardware.driver import CUDA_ERROR_NO_DEVICE
from gracetune.hardware.machine import Gpu
from gracetune.hardware.software import release
from gracetune.units import GIB, format_bytes

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
    driver_version, torch_version = release(has)[:2], release(needs)[:2]
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
