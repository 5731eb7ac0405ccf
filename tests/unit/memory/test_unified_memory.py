"""Opening the unified-memory layer from a run's options, on a fake driver and modelled machines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.environment import Environment
from gracetune.config.memory_options import MemoryOptions
from gracetune.config.run_config import RunConfig
from gracetune.hardware.machine import Machine
from gracetune.hardware.recording import load_recording
from gracetune.memory import unified_memory as layer
from gracetune.memory.arena_size import ArenaRoom, arena_size
from gracetune.memory.errors import ManagedCapError
from gracetune.memory.native import Migrations
from gracetune.memory.unified_memory import UnifiedMemory, UvmStats, add_uvm_stats
from gracetune.train.assembly import open_memory
from gracetune.train.runtime import LaunchEnvironment, Runtime
from gracetune.train.view import CollectingView
from gracetune.units import GIB
from unit.memory.conftest import Bench

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
OPTIONS = MemoryOptions(use_uvm=True)
UVM = {"use_uvm": True}


class Reserved:
    """A substitute for the arena, which needs a real GPU. It records the requested size."""

    sizes: list[int]

    def __init__(self, _uvm: object, _device: int, size: int, *_: object, **__: object) -> None:
        self.sizes.append(size)

    def close(self) -> None: ...


@pytest.fixture
def reserved(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(layer, "load", lambda: bench.uvm)
    monkeypatch.setattr(Reserved, "sizes", [], raising=False)
    monkeypatch.setattr(layer, "OverflowArena", Reserved)
    return Reserved.sizes


def machine(name: str) -> Machine:
    return load_recording(MACHINES / name)


def opened(name: str, **options: Any) -> UnifiedMemory:
    found = UnifiedMemory.open(OPTIONS, machine(name), **options)
    assert isinstance(found, UnifiedMemory)
    return found


class TestOtherManagedMemory:
    def test_takes_its_share_of_the_arena(self, reserved: list[int]) -> None:
        alone, beside = opened("gh200-numa"), opened("gh200-numa", managed_elsewhere=60 * GIB)
        assert reserved == [alone.arena_size.bytes, beside.arena_size.bytes]
        assert alone.arena_size.clamp == "none"
        assert beside.arena_size.bytes < alone.arena_size.bytes
        assert "60.0 GiB for managed caches and parked experts" in beside.arena_size.reason

    def test_takes_its_share_of_the_careful_cap(self, reserved: list[int], bench: Bench) -> None:
        found = opened("x86-h200", managed_elsewhere=3 * GIB)
        assert reserved == [GIB]
        assert "3.00 GiB is for managed caches and parked experts" in found.arena_size.reason
        assert bench.uvm.total_stats().cap_bytes == 4 * GIB

    def test_is_what_a_plan_sizes_the_arena_by(self, reserved: list[int]) -> None:
        opened("gb200", local_ranks=2, managed_elsewhere=53 * GIB)
        room = ArenaRoom.for_arena(machine("gb200"), sharers=2)
        assert reserved == [arena_size(room, OPTIONS.uvm_oversubscription_ratio, other_managed=53 * GIB).bytes]


class TestForce:
    def test_without_it_a_machine_behind_pcie_stays_under_the_cap(self, reserved: list[int], bench: Bench) -> None:
        opened("x86-h200")
        assert reserved == [4 * GIB]
        with pytest.raises(ManagedCapError, match="--force-oversubscription"):
            bench.uvm.allocate(5 * GIB, 0)

    def test_with_it_main_memory_is_the_limit(self, reserved: list[int], bench: Bench) -> None:
        found = opened("x86-h200", force_oversubscription=True)
        assert found.arena_size.bytes > 500 * GIB
        assert bench.uvm.total_stats().cap_bytes is None


class TestOpenMemory:
    """The arguments that a run passes on. Only the GPU is simulated."""

    def open(self, name: str, memory: Mapping[str, bool] = UVM, **given: Any) -> CollectingView:
        tree = {
            "name": "run", "output_dir": "out", "model": {"family": "wan"}, "training": {"max_steps": 1},
            "datasets": [{"id": "data", "path": "/nowhere"}], "memory": memory,
        }  # fmt: skip
        runtime = Runtime(
            rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cuda", 0), precision="bf16",
            launch=LaunchEnvironment(), key="",
        )  # fmt: skip
        view = CollectingView()
        with ExitStack() as stack:
            config = RunConfig.model_validate(tree)
            assert open_memory(config, machine(name), runtime, Environment({}), view, stack, **given) is not None
        return view

    def test_the_arenas_line_names_what_is_managed_beside_it(self, reserved: list[int]) -> None:
        view = self.open("gh200-numa", managed_elsewhere=60 * GIB)
        (line,) = [text for text in view.lines if text.startswith("overflow arena: ")]
        assert "60.0 GiB for managed caches and parked experts" in line

    def test_the_flag_reaches_the_cap(self, reserved: list[int], bench: Bench) -> None:
        view = self.open("x86-h200", force_oversubscription=True)
        assert bench.uvm.total_stats().cap_bytes is None
        assert reserved[0] > 500 * GIB
        assert not view.warnings

    def test_a_flag_without_effect_is_a_warning(self, reserved: list[int]) -> None:
        hints = {"enable_uvm_hints": True}
        (off,) = self.open("x86-h200", hints, force_oversubscription=True).warnings
        assert off == "--force-oversubscription: no effect, because memory.use_uvm is off"
        (coherent,) = self.open("gh200-numa", force_oversubscription=True).warnings
        assert "the link to the CPU is coherent" in coherent


def test_a_room_for_the_arena_keeps_more_than_the_hosts_reserve() -> None:
    plain = ArenaRoom.of(machine("gh200-numa"))
    assert ArenaRoom.for_arena(machine("gh200-numa"), sharers=3) == replace(
        plain, reserve=plain.reserve * 5 // 4, sharers=3
    )


def test_a_profiler_that_takes_cupti_over_ends_the_counting_and_not_the_run(reserved: list[int], bench: Bench) -> None:
    found = UnifiedMemory.open(MemoryOptions(enable_uvm_hints=True), machine("gh200-numa"))
    assert isinstance(found, UnifiedMemory)
    for requested in (lambda: found.uvm_stats().migrations, found.close):
        assert bench.uvm.count_migrations([str(bench.fake.path)]) is None
        found.uncounted = None
        bench.fake.fail("cuptiActivityFlushAll", 33)
        assert requested() is None
        assert found.uncounted


STATISTICS = {
    "uvm.stage",
    "uvm.transitions",
    "uvm.light_reclamations",
    "uvm.hard_reclamations",
    "uvm.arena_reserved_bytes",
    "uvm.arena_active_bytes",
    "uvm.arena_peak_bytes",
    "uvm.refused",
    "uvm.hinted_bytes",
    "uvm.hints_refused",
    "uvm.prefetched_bytes",
    "uvm.prefetch_wait_ms",
}


@given(st.dictionaries(st.text(), st.integers()))
def test_torchs_own_come_through_and_its_dictionary_stays_as_it_was(torch_stats: dict[str, int]) -> None:
    before = dict(torch_stats)
    found = add_uvm_stats(MappingProxyType(torch_stats), UvmStats())
    assert torch_stats == before
    assert {key: value for key, value in found.items() if key not in STATISTICS} == {
        key: value for key, value in before.items() if key not in STATISTICS
    }
    assert found.keys() == before.keys() | STATISTICS


def test_every_value_stands_under_its_own_name() -> None:
    stats = UvmStats(
        stage=2,
        transitions=3,
        light_reclamations=4,
        hard_reclamations=5,
        arena_reserved_bytes=6,
        arena_active_bytes=7,
        arena_peak_bytes=8,
        refused=9,
        hinted_bytes=12,
        hints_refused=13,
        prefetched_bytes=10,
        prefetch_wait_ms=11.5,
    )
    assert list(add_uvm_stats({}, stats).values()) == [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 10, 11.5]
    assert list(add_uvm_stats({}, stats)) == [f"uvm.{name}" for name in vars(stats) if name != "migrations"]


def test_page_faults_and_migrations_stand_there_where_they_are_counted() -> None:
    found = add_uvm_stats({}, UvmStats(migrations=Migrations(1, 2, 3, 4)))
    assert {name: value for name, value in found.items() if name not in STATISTICS} == {
        "uvm.migrated_to_device_bytes": 1,
        "uvm.migrated_to_host_bytes": 2,
        "uvm.cpu_page_faults": 3,
        "uvm.gpu_page_faults": 4,
    }
