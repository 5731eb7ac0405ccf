"""Sensors of free host memory: how much this process can still allocate, by /proc/meminfo and its control group.

Every `read` takes a new measurement. None means unknown, and `notes` say why. Decisions are made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gracetune.hardware.cgroup import locate, read_cgroup_at
from gracetune.hardware.files import HostFiles
from gracetune.hardware.host import MEMINFO, NODES, parse_meminfo
from gracetune.hardware.machine import Gpu, NumaNode
from gracetune.hardware.probe import read_host_memory


@dataclass(frozen=True)
class HostReading:
    """A measurement of main memory, in bytes. GPU memory that a GH200 in NUMA mode adds to it is subtracted."""

    mem_available: int | None
    cgroup_available: int | None
    """None if there is no limit, or if its usage cannot be read; `notes` then say so."""
    notes: tuple[str, ...] = ()

    @property
    def headroom(self) -> int | None:
        """The bytes this process can still allocate. None if MemAvailable is unknown, even with a cgroup limit."""
        if self.mem_available is None:
            return None
        return self.mem_available if self.cgroup_available is None else min(self.mem_available, self.cgroup_available)


class HostSensor:
    """Reads `/proc/meminfo` and the process's control group, below `root`."""

    def __init__(
        self, gpus: tuple[Gpu, ...] = (), root: Path = Path("/"), nodes: tuple[NumaNode, ...] | None = None
    ) -> None:
        """Pass `nodes` if they are known, for example from a machine report."""
        self._files = HostFiles(root)
        # Look up the GPU memory nodes once: they never change, and this takes longer than everything else.
        if nodes is None:
            nodes = read_host_memory(gpus, root).numa_nodes
        self._foreign = tuple(node.id for node in nodes if node.is_gpu_memory is not False)
        self._group = locate(self._files)

    def read(self) -> HostReading:
        available = parse_meminfo(self._files.read(MEMINFO) or "").get("MemAvailable")
        notes = [] if available is not None else [f"main memory: {MEMINFO} has no MemAvailable"]
        if available is not None:
            available = max(0, available - sum(self._free_on(node) for node in self._foreign))
        group = read_cgroup_at(self._files, self._group) if self._group is not None else None
        if group is not None and group.limit is not None and group.available is None:
            notes.append("control group: it has a memory limit, but its usage cannot be read")
        return HostReading(available, group.available if group else None, tuple(notes))

    def _free_on(self, node: int) -> int:
        """The part of MemAvailable that lies on this node: free memory and page cache."""
        memory = parse_meminfo(self._files.read(f"{NODES}/node{node}/meminfo") or "")
        return memory.get("MemFree", 0) + memory.get("FilePages", 0)
