"""NUMA binding: keeps staged pages in the CPU's own memory.

On a superchip in NUMA mode, GPU memory is an ordinary NUMA node. The kernel allocates from it once the CPU's memory is
full, so a staged dataset would take the memory the model needs. Binding staged memory to the CPU's nodes makes the
kernel reclaim page cache instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from typing import Final

from gracetune.hardware.machine import Machine
from gracetune.hostmem.hint import Hint, not_applied

_MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""System call numbers of `mbind` by architecture. glibc has no wrapper for it."""
_MPOL_BIND: Final = 2
"""The strict policy of <linux/mempolicy.h>: allocate from the given nodes only."""
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_REMEDIES: Final = {
    errno.EPERM: "the container forbids it; start it with --cap-add SYS_NICE",
    errno.ENOSYS: "this kernel is built without NUMA support",
    errno.EINVAL: "this process may not use the node; look at cpuset.mems of its control group",
}


@dataclass(frozen=True)
class NodeChoice:
    """The NUMA nodes to bind staged pages to. An empty tuple means that any node will do."""

    nodes: tuple[int, ...]
    reason: str


def choose_nodes(machine: Machine) -> NodeChoice:
    """Choose the CPUs' own nodes: a board with two superchips has two. A pure function of the machine."""
    nodes = machine.host.numa_nodes
    foreign = [node.id for node in nodes if node.is_gpu_memory is not False]
    own = tuple(node.id for node in nodes if node.is_gpu_memory is False and node.cpu_count and node.memory_total)
    if machine.profile.value != "superchip" and not foreign:
        return NodeChoice((), "not needed: no GPU memory is among the NUMA nodes of this machine")
    if not own:
        return NodeChoice((), "not possible: the kernel lists no NUMA node with CPUs and memory")
    named = "node " + ", ".join(str(node) for node in own)
    if foreign:
        gpu_nodes = ", ".join(map(str, foreign))
        return NodeChoice(own, f"{named}: CPU memory; GPU memory is node {gpu_nodes}")
    return NodeChoice(own, f"{named}: CPU memory; GPU memory is not a NUMA node here")


def bind(descriptor: int, length: int, choice: NodeChoice) -> Hint:
    """Bind the pages of a memory file to the chosen nodes. Call it before writing: existing pages do not move."""
    if not choice.nodes:
        return not_applied(choice.reason)
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return not_applied(f"not bound to {choice.reason}: mbind is not known for {os.uname().machine}")
    # The policy belongs to the file, not to this mapping: it applies to writes by descriptor and outlives the mapping.
    with mmap.mmap(descriptor, length) as mapping:
        failed = _mbind(number, mapping, choice.nodes)
    if failed:
        remedy = _REMEDIES.get(failed, "the kernel chooses the nodes")
        return not_applied(f"not bound to {choice.reason}: {os.strerror(failed)} ({remedy})")
    return Hint(applied=True, bytes=length, reason=f"bound to {choice.reason}")


def _mbind(number: int, mapping: mmap.mmap, nodes: tuple[int, ...]) -> int:
    """Call mbind. Returns the error number, or 0 for success."""
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()  # the node mask: one bit per node
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << (node % _WORD_BITS)
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_char.from_buffer(mapping)
    done = library.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(first)),
        ctypes.c_ulong(len(mapping)),
        ctypes.c_int(_MPOL_BIND),
        words,
        ctypes.c_ulong(len(words) * _WORD_BITS + 1),  # maxnode: the kernel reads maxnode - 1 bits
        ctypes.c_uint(0),
    )
    failed = ctypes.get_errno() if done != 0 else 0
    del first  # it holds a buffer export, and the mapping cannot close until that is released
    return failed
