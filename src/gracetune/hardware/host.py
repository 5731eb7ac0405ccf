"""CPU, memory and kernel settings of a machine, from its `/proc` and `/sys`.

Parsers never raise. For text that they do not understand, they return None or an empty result, which means unknown.
"""

from __future__ import annotations

import os
import re
from typing import Literal

from gracetune.hardware.cgroup import read_cgroup
from gracetune.hardware.files import HostFiles, parse_colon_lines, parse_integer
from gracetune.hardware.machine import FrozenFacts, Host, NumaNode, PcieLink

NODES = "/sys/devices/system/node"
PCI_DEVICES = "/sys/bus/pci/devices"
CPUINFO = "/proc/cpuinfo"
MEMINFO = "/proc/meminfo"
STATUS = "/proc/self/status"
LIMITS = "/proc/self/limits"
NVIDIA_MODULE_VERSION = "/sys/module/nvidia/version"
NVIDIA_VERSION = "/proc/driver/nvidia/version"
NVIDIA_PARAMS = "/proc/driver/nvidia/params"
CONTAINER_MARKERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
LINK_FILES = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")

COHERENT_MODE = "CoherentGPUMemoryMode"
USER_NUMA = "EnableUserNUMAManagement"

_NVIDIA_VENDOR = 0x10DE
_DISPLAY_CLASS = 0x03

# /proc/cpuinfo has only numbers for Arm cores. These are the names of the cores in Grace and GB10.
_ARM_CORES = {
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
}


class ProcessFacts(FrozenFacts):
    """Facts that come from system calls.

    The page size is in `/proc/self/smaps` too. But that file contains the paths of all mapped files, which a recording
    must not include, and it shows other values for huge-page mappings. sysconf is unambiguous.
    """

    architecture: str | None = None
    page_size: int | None = None

    @classmethod
    def of_this_process(cls) -> ProcessFacts:
        return cls(architecture=os.uname().machine, page_size=os.sysconf("SC_PAGE_SIZE"))


def read_host(files: HostFiles, process: ProcessFacts) -> Host:
    memory = parse_meminfo(files.read(MEMINFO) or "")
    parameters = parse_colon_lines(files.read(NVIDIA_PARAMS) or "")
    return Host(
        architecture=process.architecture,
        page_size=process.page_size,
        kernel=parse_word(files.read("/proc/sys/kernel/osrelease")),
        cpu_model=parse_cpu_model(files.read(CPUINFO) or ""),
        cpu_count=parse_allowed_cpus(files.read(STATUS) or ""),
        mem_total=memory.get("MemTotal"),
        mem_available=memory.get("MemAvailable"),
        swap_total=memory.get("SwapTotal"),
        memlock_limit=parse_memlock(files.read(LIMITS) or ""),
        transparent_huge_pages=parse_bracketed(files.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""),
        numa_balancing=parse_integer(files.read("/proc/sys/kernel/numa_balancing")),
        numa_nodes=read_numa_nodes(files),
        cgroup=read_cgroup(files),
        container=next((kind for path, kind in CONTAINER_MARKERS.items() if files.read(path) is not None), None),
        nvidia_pci_devices=count_nvidia_devices(files),
        nvidia_kernel_driver=read_kernel_driver(files),
        coherent_memory_parameter=parse_quoted(parameters.get(COHERENT_MODE)),
        user_numa_management=parse_integer(parameters.get(USER_NUMA)),
    )


def read_numa_nodes(files: HostFiles) -> tuple[NumaNode, ...]:
    nodes = []
    for name in files.names(NODES) or ():
        match = re.fullmatch(r"node([0-9]{1,6})", name)
        if match is None:
            continue
        cpus = (files.read(f"{NODES}/{name}/cpulist") or "").strip()
        memory = parse_meminfo(files.read(f"{NODES}/{name}/meminfo") or "")
        nodes.append(
            NumaNode(
                id=int(match[1]),
                cpus=cpus,
                cpu_count=count_cpus(cpus) or 0,
                memory_total=memory.get("MemTotal"),
                memory_free=memory.get("MemFree"),
                page_cache=memory.get("FilePages"),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def count_nvidia_devices(files: HostFiles) -> int | None:
    """The number of NVIDIA devices of the display class (graphics and compute); None without a PCI bus."""
    addresses = files.names(PCI_DEVICES)
    if addresses is None:
        return None
    return sum(_is_nvidia_gpu(files, address) for address in addresses)


def _is_nvidia_gpu(files: HostFiles, address: str) -> bool:
    if not is_nvidia_vendor(files.read(f"{PCI_DEVICES}/{address}/vendor")):
        return False
    kind = parse_hexadecimal(files.read(f"{PCI_DEVICES}/{address}/class"))
    return kind is not None and kind >> 16 == _DISPLAY_CLASS


def is_nvidia_vendor(text: str | None) -> bool:
    return parse_hexadecimal(text) == _NVIDIA_VENDOR


def read_kernel_driver(files: HostFiles) -> str | None:
    return parse_word(files.read(NVIDIA_MODULE_VERSION)) or parse_nvidia_version(files.read(NVIDIA_VERSION) or "")


def read_pcie_link(files: HostFiles, address: str) -> PcieLink | None:
    """The PCIe link of one device; None if sysfs does not show it."""
    speed, width, max_speed, max_width = (files.read(f"{PCI_DEVICES}/{address}/{name}") for name in LINK_FILES)
    link = PcieLink(
        speed_gts=parse_link_speed(speed or ""),
        width=parse_link_width(width),
        max_speed_gts=parse_link_speed(max_speed or ""),
        max_width=parse_link_width(max_width),
    )
    return None if link == PcieLink() else link


def parse_meminfo(text: str) -> dict[str, int]:
    """`MemTotal:  123 kB` -> bytes. Per-node files have lines such as `Node 0 MemTotal:  123 kB`."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(?:Node +[0-9]+ +)?([A-Za-z_()0-9]+): +([0-9]{1,18})( kB)?\s*", line)
        if match is not None:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def parse_cpu_model(text: str) -> str | None:
    """The `model name` on x86, or the names of the Arm cores in the order of the file."""
    named = re.search(r"^model name\s*:[ \t]*(\S.*)$", text, re.MULTILINE)
    if named is not None:
        return named[1].strip()
    implementers = re.findall(r"^CPU implementer\s*:\s*(0x[0-9a-f]+)\s*$", text, re.MULTILINE)
    parts = re.findall(r"^CPU part\s*:\s*(0x[0-9a-f]+)\s*$", text, re.MULTILINE)
    cores = [_ARM_CORES.get(core, f"Arm core {core[0]}:{core[1]}") for core in zip(implementers, parts, strict=False)]
    return " + ".join(dict.fromkeys(cores)) or None


def parse_allowed_cpus(text: str) -> int | None:
    """The number of CPUs that this process may use, from `/proc/self/status`."""
    return count_cpus(parse_colon_lines(text).get("Cpus_allowed_list", ""))


def count_cpus(text: str) -> int | None:
    """`0-3,8` -> 5; None for text that is not a CPU list, including an empty one."""
    total = 0
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        total += max(0, last - first + 1)
    return total


def parse_memlock(text: str) -> int | Literal["unlimited"] | None:
    """The soft limit on locked memory from `/proc/self/limits`."""
    match = re.search(r"^Max locked memory +(unlimited|[0-9]{1,19}) ", text, re.MULTILINE)
    if match is None:
        return None
    return "unlimited" if match[1] == "unlimited" else int(match[1])


def parse_bracketed(text: str) -> str | None:
    """`always [madvise] never` -> `madvise`."""
    match = re.search(r"\[([a-z_+]+)\]", text)
    return match[1] if match else None


def parse_nvidia_version(text: str) -> str | None:
    """The number in `NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build ...`."""
    match = re.search(r"^NVRM version:.*?\s([0-9]{2,4}(?:\.[0-9]+){1,3})(?:\s|$)", text, re.MULTILINE)
    return match[1] if match else None


def parse_quoted(text: str | None) -> str | None:
    """A module parameter of type string: `"driver"` -> `driver`. It is empty if the parameter is not set."""
    if text is None:
        return None
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def parse_word(text: str | None) -> str | None:
    """A single word without any other text; else None."""
    words = (text or "").split()
    return words[0] if len(words) == 1 else None


def parse_hexadecimal(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", stripped) else None


def parse_link_speed(text: str) -> float | None:
    """`32.0 GT/s PCIe` -> 32.0."""
    match = re.match(r"\s*([0-9]{1,4}(?:\.[0-9]{1,3})?) GT/s", text)
    return float(match[1]) if match else None


def parse_link_width(text: str | None) -> int | None:
    """The number of lanes. The kernel writes 0 or 255 for a device without a PCIe link."""
    width = parse_integer(text)
    return width if width is not None and 0 < width <= 32 else None
