from __future__ import annotations

from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from gracetune.memory.native import Migrations
from gracetune.memory.stats import UvmStats, merged

NAMES = {
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
    found = merged(MappingProxyType(torch_stats), UvmStats())
    assert torch_stats == before
    assert {key: value for key, value in found.items() if key not in NAMES} == {
        key: value for key, value in before.items() if key not in NAMES
    }
    assert found.keys() == before.keys() | NAMES


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
    assert list(merged({}, stats).values()) == [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 10, 11.5]
    assert list(merged({}, stats)) == [f"uvm.{name}" for name in vars(stats) if name != "migrations"]


def test_page_faults_and_migrations_stand_there_where_they_are_counted() -> None:
    found = merged({}, UvmStats(migrations=Migrations(1, 2, 3, 4)))
    assert {name: value for name, value in found.items() if name not in NAMES} == {
        "uvm.migrated_to_device_bytes": 1,
        "uvm.migrated_to_host_bytes": 2,
        "uvm.cpu_page_faults": 3,
        "uvm.gpu_page_faults": 4,
    }
