"""Page faults and migrations: CUPTI's records are added up, and if counting is impossible, the reason is reported."""

from __future__ import annotations

import pytest

from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.native import Migrations, Unavailable
from unit.memory.conftest import Bench, Workshop

TO_DEVICE, TO_HOST, CPU_FAULT, GPU_FAULTS, THRASHING = 1, 2, 3, 4, 5


@pytest.fixture
def bench(workshop: Workshop) -> Bench:
    return workshop.bench()


def counting(bench: Bench) -> Bench:
    assert bench.uvm.count_migrations(["no-such-library.so", str(bench.fake.path)]) is None
    return bench


def test_records_are_added_up_over_many_buffers(bench: Bench) -> None:
    counting(bench)
    for _ in range(10_000):
        bench.fake.migration(TO_DEVICE, 4096)
    bench.fake.migration(TO_HOST, 1 << 20)
    for _ in range(3):
        bench.fake.migration(CPU_FAULT, 0x7F0012345678)  # the address of an instruction
    bench.fake.migration(GPU_FAULTS, 17)
    bench.fake.migration(GPU_FAULTS, 4)
    bench.fake.migration(THRASHING, 1 << 40)
    bench.fake.migration(TO_HOST, 1 << 50, activity=7)
    assert bench.uvm.migrations() == Migrations(10_000 * 4096, 1 << 20, 3, 21)
    assert bench.uvm.migrations().gpu_page_faults == 21, "they are kept"
    bench.fake.migration(GPU_FAULTS, 1)
    assert bench.uvm.migrations().gpu_page_faults == 22


def test_asking_twice_is_asking_once_and_after_the_end_nothing_is_counted(bench: Bench) -> None:
    counting(bench)
    counting(bench)
    bench.fake.migration(GPU_FAULTS, 5)
    bench.uvm.stop_counting_migrations()
    bench.fake.migration(GPU_FAULTS, 5)
    bench.uvm.stop_counting_migrations()
    counting(bench)
    assert bench.uvm.migrations().gpu_page_faults == 5


@pytest.mark.parametrize(
    "function",
    ["cuptiActivityRegisterCallbacks", "cuptiActivityConfigureUnifiedMemoryCounter", "cuptiActivityEnable"],
)
def test_what_cupti_rejects_is_told(bench: Bench, function: str) -> None:
    bench.fake.fail(function, 33)
    found = bench.uvm.count_migrations([str(bench.fake.path)])
    assert isinstance(found, Unavailable)
    assert "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED" in found.reason
    assert bench.uvm.count_migrations([str(bench.fake.path)]) is None, "and may work another time"


def test_libraries_that_are_none_are_named(bench: Bench) -> None:
    found = bench.uvm.count_migrations(["no-such-library.so", "libm.so.6"])
    assert isinstance(found, Unavailable)
    assert "no-such-library.so" in found.reason
    assert "cuptiActivityRegisterCallbacks" in found.reason


def test_a_flush_that_fails_is_an_error(bench: Bench) -> None:
    counting(bench)
    bench.fake.fail("cuptiActivityFlushAll", 33)
    with pytest.raises(UnifiedMemoryError, match="CUPTI"):
        bench.uvm.migrations()
