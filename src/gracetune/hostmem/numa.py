"""Keeping staged pages in the CPU's own memory.

On a superchip in NUMA mode the GPU's memory is a NUMA node like any other, and the kernel overflows into it when the
CPU's fills up: a staged dataset would then eat the memory the model needs. Binding the arena to the CPU's nodes makes
the kernel reclaim page cache instead.
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

# glibc has no wrapper for these; the numbers are the kernel's, per architecture.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND: Final = 2
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_REMEDIES: Final = {
    errno.EPERM: "the container forbids it; start it with --cap-add SYS_NICE",
    errno.ENOSYS: "this kernel is built without NUMA",
    errno.EINVAL: "the node is not open to this process; look at cpuset.mems of its control group",
}


@dataclass(frozen=True)
class NodeChoice:
    """The NUMA nodes staged pages belong on; none means that any will do."""

    nodes: tuple[int, ...]
    reason: str


def choose_nodes(machine: Machine) -> NodeChoice:
    """Pure. All the CPUs' nodes together: a board with two superchips has two."""
    nodes = machine.host.numa_nodes
    foreign = [node.id for node in nodes if node.is_gpu_memory is not False]
    own = tuple(node.id for node in nodes if node.is_gpu_memory is False and node.cpu_count and node.memory_total)
    if machine.profile.value != "superchip" and not foreign:
        return NodeChoice((), "not needed: no GPU memory is among the NUMA nodes of this machine")
    if not own:
        return NodeChoice((), "not possible: the kernel names no NUMA node with CPUs and memory")
    named = "node " + ", ".join(str(node) for node in own)
    if foreign:
        return NodeChoice(own, f"{named}: the CPU's, away from GPU memory in node {', '.join(map(str, foreign))}")
    return NodeChoice(own, f"{named}: the CPU's; the GPU's memory is no node here")


def bind(descriptor: int, length: int, choice: NodeChoice) -> Hint:
    """Let the pages of a memory file come from the chosen nodes. Before any is written: placed pages stay put."""
    if not choice.nodes:
        return not_applied(choice.reason)
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return not_applied(f"not bound to {choice.reason}: no mbind known for {os.uname().machine}")
    # The policy belongs to the file, not to this mapping: it holds for writes by descriptor and outlives the mapping.
    with mmap.mmap(descriptor, length) as mapping:
        failed = _mbind(number, mapping, choice.nodes)
    if failed:
        remedy = _REMEDIES.get(failed, "pages lie where the kernel puts them")
        return not_applied(f"not bound to {choice.reason}: {os.strerror(failed)} ({remedy})")
    return Hint(True, length, f"bound to {choice.reason}")


def _mbind(number: int, mapping: mmap.mmap, nodes: tuple[int, ...]) -> int:
    """The error number, 0 for success."""
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
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
        ctypes.c_ulong(len(words) * _WORD_BITS + 1),  # the kernel counts one more than it reads
        ctypes.c_uint(0),
    )
    failed = ctypes.get_errno() if done != 0 else 0
    del first  # it keeps the mapping open
    return failed
