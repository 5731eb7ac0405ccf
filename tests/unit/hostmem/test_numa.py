from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import pytest

from gracetune.hostmem import numa
from gracetune.hostmem.numa import NodeChoice, bind, choose_nodes
from gracetune.hostmem.segment import Segment, SegmentEntry, SegmentWriter
from unit.hardware.machines import NAMES, load

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
BIND, OF_ADDRESS = 2, 2


class TestChoice:
    def test_a_superchip_in_numa_mode_keeps_staged_pages_out_of_hbm(self) -> None:
        choice = choose_nodes(load("gh200-numa"))
        assert choice.nodes == (0,)
        assert "GPU memory is node 1" in choice.reason

    def test_two_superchips_use_both_cpus(self) -> None:
        machine = load("gb200")
        choice = choose_nodes(machine)
        with_cpus = [node.id for node in machine.host.numa_nodes if node.cpu_count]
        assert choice.nodes == tuple(with_cpus)

    def test_a_superchip_whose_driver_keeps_the_gpu_memory(self) -> None:
        choice = choose_nodes(load("gh200-cdmm"))
        assert choice.nodes == (0,)
        assert "not a NUMA node here" in choice.reason

    @pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("g") or name == "gb10"])
    def test_other_machines_need_nothing(self, name: str) -> None:
        choice = choose_nodes(load(name))
        assert choice.nodes == ()
        assert choice.reason.startswith("not needed")

    def test_a_kernel_without_numa_nodes_is_reported(self) -> None:
        machine = load("gh200-numa")
        blind = machine.model_copy(update={"host": machine.host.model_copy(update={"numa_nodes": ()})})
        assert choose_nodes(blind).reason.startswith("not possible")


class TestBinding:
    @pytest.fixture
    def memory(self) -> int:
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, 1 << 20)
        return descriptor

    def test_the_policy_applies_to_writes_by_descriptor(self) -> None:
        with SegmentWriter(1 << 20, NodeChoice((0,), "node 0")) as writer:
            if not writer.numa:
                pytest.skip(f"mbind does not work here: {writer.numa.reason}")
            offset = writer.reserve(100)
            writer.write(offset, b"x" * 100)
            assert (writer.numa.reason, writer.numa.bytes >= 1 << 20) == ("bound to node 0", True)
            segment = Segment(writer.finish([SegmentEntry("a", 0, offset, 100, 100, 0, bytes(16))]))
        with mmap.mmap(segment.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            assert _policy_of(mapping) == BIND
        segment.close()

    def test_a_node_that_does_not_exist_is_rejected_with_the_reason(self, memory: int) -> None:
        outcome = bind(memory, 1 << 20, NodeChoice((63,), "node 63"))
        os.close(memory)
        assert not outcome
        assert outcome.reason.startswith("not bound to node 63: ")

    def test_a_forbidding_container_gets_a_remedy(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numa, "_mbind", lambda *arguments: 1)
        outcome = bind(memory, 1 << 20, NodeChoice((0,), "node 0"))
        os.close(memory)
        assert not outcome
        assert "--cap-add SYS_NICE" in outcome.reason

    def test_an_unknown_architecture_is_not_bound(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numa, "_MBIND", {})
        outcome = bind(memory, 1 << 20, NodeChoice((0,), "node 0"))
        os.close(memory)
        assert "mbind is not known" in outcome.reason


def _policy_of(mapping: mmap.mmap) -> int:
    import numpy as np

    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    policy, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    done = ctypes.CDLL(None).syscall(
        ctypes.c_long(GET_MEMPOLICY[platform.machine()]), ctypes.byref(policy), nodes, ctypes.c_ulong(1024),
        ctypes.c_void_p(address), ctypes.c_ulong(OF_ADDRESS),
    )  # fmt: skip
    assert done == 0, Path("/proc/self/status").read_text()
    return policy.value
