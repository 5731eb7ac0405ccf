"""How much main memory this process can still take: main memory and the control group, read afresh each time.

None means unknown, and `notes` say why. Nothing in here decides anything.
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
    """Main memory, without the GPU memory that a GH200 in NUMA mode adds to it."""

    mem_available: int | None
    cgroup_available: int | None
    """None: no limit (or one whose use cannot be read, which `notes` then say)."""
    notes: tuple[str, ...] = ()

    @property
    def headroom(self) -> int | None:
        """What this process can still take; unknown where MemAvailable is, whatever the control group says."""
        if self.mem_available is None:
            return None
        return self.mem_available if self.cgroup_available is None else min(self.mem_available, self.cgroup_available)


class HostSensor:
    """`/proc/meminfo` and the control group below `root`."""

    def __init__(
        self, gpus: tuple[Gpu, ...] = (), root: Path = Path("/"), nodes: tuple[NumaNode, ...] | None = None
    ) -> None:
        """`nodes` where they are known: a machine's report has them."""
        self._files = HostFiles(root)
        # Which nodes are GPU memory does not change while we run; finding out takes longer than all the rest.
        if nodes is None:
            nodes = read_host_memory(gpus, root).numa_nodes
        self._foreign = tuple(node.id for node in nodes if node.is_gpu_memory is not False)
        self._group = locate(self._files)

    def read(self) -> HostReading:
        available = parse_meminfo(self._files.read(MEMINFO) or "").get("MemAvailable")
        notes = [] if available is not None else [f"main memory: {MEMINFO} does not say MemAvailable"]
        if available is not None:
            available = max(0, available - sum(self._free_on(node) for node in self._foreign))
        group = read_cgroup_at(self._files, self._group) if self._group is not None else None
        if group is not None and group.limit is not None and group.available is None:
            notes.append("control group: it has a memory limit, but its use cannot be read")
        return HostReading(available, group.available if group else None, tuple(notes))

    def _free_on(self, node: int) -> int:
        memory = parse_meminfo(self._files.read(f"{NODES}/node{node}/meminfo") or "")
        return memory.get("MemFree", 0) + memory.get("FilePages", 0)
