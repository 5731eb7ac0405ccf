"""The direct calls of managed buffers: allocate, advise, prefetch, query, free."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from gracetune.memory.errors import DriverError, DriverTooOldError, ManagedCapError, UnifiedMemoryError
from gracetune.memory.native import HOST, Advice, ManagedSpan, RangeState, SlotPolicy
from gracetune.units import GIB, KIB, MIB

INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 1, 2, 101
PAGE = mmap.PAGESIZE
STREAM = 0x5EED


def test_direct_memory_is_usable_counted_and_given_back(bench):
    span = bench.uvm.allocate(5 * MIB + 3, device=0)
    ctypes.memset(span.pointer, 7, span.bytes)
    during = bench.uvm.total_stats()
    assert (during.live_bytes, during.allocations) == (5 * MIB + 3, 1)
    bench.uvm.free(span)
    assert bench.uvm.total_stats().live_bytes == bench.fake.in_use == 0


def test_direct_memory_gets_no_advice_of_its_own(bench):
    bench.uvm.allocate(MIB, device=0)
    assert bench.fake.journal("cuMemAdvise") == []


def test_over_the_process_cap_the_error_says_what_was_asked_and_what_is_there(bench):
    bench.uvm.set_managed_cap(2 * MIB)
    bench.uvm.allocate(MIB, device=0)
    with pytest.raises(ManagedCapError) as caught:
        bench.uvm.allocate(MIB + 1, device=0)
    assert (caught.value.requested, caught.value.live, caught.value.cap) == (MIB + 1, MIB, 2 * MIB)
    assert "1.00 MiB of the cap of 2.00 MiB" in str(caught.value)
    assert bench.uvm.total_stats().refused_by_cap == 1


def test_out_of_memory_names_the_function_the_error_and_a_remedy(bench):
    bench.fake.capacity(MIB)
    with pytest.raises(DriverError) as caught:
        bench.uvm.allocate(2 * MIB, device=0)
    error = caught.value
    assert (error.function, error.code, error.name) == ("cuMemAllocManaged", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
    assert "out of memory" in str(error)
    assert "uvm_oversubscription_ratio" in str(error)
    assert isinstance(error, UnifiedMemoryError)


def test_an_error_the_driver_has_no_name_for_is_still_told(bench):
    bench.fake.fail("cuMemAllocManaged", 987)
    with pytest.raises(DriverError, match=r"cuMemAllocManaged failed with unnamed error \(987\)"):
        bench.uvm.allocate(MIB, device=0)


def test_a_gpu_that_is_not_there(bench):
    with pytest.raises(DriverError, match="CUDA_VISIBLE_DEVICES") as caught:
        bench.uvm.allocate(MIB, device=5)
    assert (caught.value.function, caught.value.code) == ("cuDeviceGet", INVALID_DEVICE)
    assert bench.uvm.total_stats().live_bytes == 0


def test_freeing_twice_is_an_error_and_does_not_disturb_the_counters(bench):
    keep, gone = bench.uvm.allocate(MIB, device=0), bench.uvm.allocate(MIB, device=0)
    bench.uvm.free(gone)
    with pytest.raises(DriverError, match="cuMemFree_v2"):
        bench.uvm.free(gone)
    stats = bench.uvm.total_stats()
    assert (stats.live_bytes, stats.frees, stats.failed_frees) == (keep.bytes, 1, 1)


def test_freeing_more_than_there_is_never_reaches_the_driver(bench):
    span = bench.uvm.allocate(MIB, device=0)
    with pytest.raises(ValueError, match="invalid device, location, range or size"):
        bench.uvm.free(ManagedSpan(span.pointer, 2 * MIB, 0))
    assert bench.fake.journal("cuMemFree") == []
    bench.uvm.free(span)


def test_what_was_advised_and_prefetched_reads_back(bench):
    span = bench.uvm.allocate(8 * PAGE, device=1)
    assert bench.uvm.range_state(span) == RangeState(None, None, (), False)
    bench.uvm.advise(span, Advice.SET_PREFERRED_LOCATION, HOST)
    bench.uvm.advise(span, Advice.SET_ACCESSED_BY, 1)
    bench.uvm.advise(span, Advice.SET_ACCESSED_BY, 0)
    bench.uvm.advise(span, Advice.SET_READ_MOSTLY)
    bench.uvm.prefetch(span, 1, STREAM)
    assert bench.uvm.range_state(span) == RangeState(HOST, 1, (0, 1), True)
    bench.uvm.advise(span, Advice.UNSET_PREFERRED_LOCATION)
    bench.uvm.advise(span, Advice.UNSET_ACCESSED_BY, 1)
    bench.uvm.advise(span, Advice.UNSET_READ_MOSTLY)
    bench.uvm.prefetch(span, HOST, STREAM)
    assert bench.uvm.range_state(span) == RangeState(None, HOST, (0,), False)


@pytest.mark.parametrize("advice", [Advice.SET_PREFERRED_LOCATION, Advice.SET_ACCESSED_BY, Advice.UNSET_ACCESSED_BY])
def test_an_advice_about_a_place_does_not_guess_the_place(bench, advice):
    span = bench.uvm.allocate(MIB, device=0)
    with pytest.raises(ValueError, match=f"{advice.name} needs a location"):
        bench.uvm.advise(span, advice)
    assert bench.fake.journal("cuMemAdvise") == []


def test_the_prefetch_goes_to_the_stream_and_the_context_it_was_asked_for(bench):
    span = bench.uvm.allocate(MIB, device=1)
    bench.fake.clear()
    bench.uvm.prefetch(span, 1, STREAM)
    assert bench.fake.journal() == [
        "cuCtxPushCurrent_v2 device=1 -> 0",
        f"cuMemPrefetchAsync_v2 bytes={MIB} advice=0 location=1 stream={STREAM} -> 0",
        "cuCtxPopCurrent_v2 -> 0",
    ]


def test_a_hint_on_a_part_stays_on_that_part(bench):
    span = bench.uvm.allocate(8 * PAGE, device=0)
    middle = ManagedSpan(span.pointer + 2 * PAGE, 2 * PAGE, 0)
    bench.uvm.advise(middle, Advice.SET_PREFERRED_LOCATION, 0)
    bench.uvm.prefetch(middle, 0, STREAM)
    assert bench.uvm.range_state(middle) == RangeState(0, 0, (), False)
    assert bench.uvm.range_state(ManagedSpan(span.pointer, 2 * PAGE, 0)) == RangeState(None, None, (), False)
    assert bench.uvm.range_state(span).preferred is None, "not the same everywhere"


@pytest.mark.parametrize("call", ["advise", "prefetch"])
def test_a_range_that_runs_over_its_allocation_is_rejected_by_the_driver_and_told(bench, call):
    span = bench.uvm.allocate(4 * PAGE, device=0)
    beyond = ManagedSpan(span.pointer + PAGE, span.bytes, 0)
    acts = {
        "advise": lambda: bench.uvm.advise(beyond, Advice.SET_READ_MOSTLY),
        "prefetch": lambda: bench.uvm.prefetch(beyond, 0, STREAM),
    }
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        acts[call]()
    assert caught.value.code == INVALID_VALUE
    assert bench.fake.open_contexts == 0


def test_a_location_that_is_not_there_is_rejected(bench):
    span = bench.uvm.allocate(MIB, device=0)
    with pytest.raises(DriverError, match="cuMemPrefetchAsync_v2"):
        bench.uvm.prefetch(span, 7, STREAM)
    with pytest.raises(ValueError, match="invalid device, location, range or size"):
        bench.uvm.prefetch(span, -2, STREAM)


FAILABLE = {
    "cuMemAdvise_v2": lambda uvm, span: uvm.advise(span, Advice.SET_READ_MOSTLY),
    "cuMemPrefetchAsync_v2": lambda uvm, span: uvm.prefetch(span, 0, STREAM),
    "cuMemRangeGetAttribute": lambda uvm, span: uvm.range_state(span),
    "cuPointerGetAttribute": lambda uvm, span: uvm.allocation_of(span.pointer, 0),
    "cuMemGetInfo_v2": lambda uvm, span: uvm.memory_info(0),
    "cuMemFree_v2": lambda uvm, span: uvm.free(span),
}


@pytest.mark.parametrize("function", FAILABLE)
@pytest.mark.parametrize("broken", ["the call itself", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"])
def test_every_failure_names_its_function_and_leaves_no_context_behind(bench, function, broken):
    span = bench.uvm.allocate(MIB, device=0)
    failing = function if broken == "the call itself" else broken
    bench.fake.fail(failing, 719)
    with pytest.raises(DriverError, match="restart the process") as caught:
        FAILABLE[function](bench.uvm, span)
    assert (caught.value.function, caught.value.code) == (failing, 719)
    # The injected failure of a pop is a context that really could not be popped; anything else must be balanced.
    assert bench.fake.open_contexts == (1 if broken == "cuCtxPopCurrent_v2" else 0)


def test_when_call_and_pop_both_fail_the_first_failure_is_told(bench):
    span = bench.uvm.allocate(MIB, device=0)
    bench.fake.fail("cuMemPrefetchAsync_v2", INVALID_VALUE)
    bench.fake.fail("cuCtxPopCurrent_v2", 201)
    with pytest.raises(DriverError) as caught:
        bench.uvm.prefetch(span, 0, STREAM)
    assert (caught.value.function, caught.value.code) == ("cuMemPrefetchAsync_v2", INVALID_VALUE)


def test_managed_or_not_is_an_answer_never_an_error(bench):
    span = bench.uvm.allocate(MIB, device=0)
    plain = ctypes.create_string_buffer(64)
    assert bench.uvm.is_managed(span.pointer, 0) is True
    assert bench.uvm.is_managed(span.pointer + MIB - 1, 0) is True
    assert bench.uvm.is_managed(ctypes.addressof(plain), 0) is False
    bench.uvm.free(span)
    assert bench.uvm.is_managed(span.pointer, 0) is False


def test_a_driver_that_cannot_answer_whether_memory_is_managed_is_an_error_all_the_same(bench):
    bench.fake.fail("cuPointerGetAttribute", 700)
    with pytest.raises(DriverError, match="cuPointerGetAttribute"):
        bench.uvm.is_managed(0x1000, 0)
    bench.fake.fail("cuCtxPushCurrent_v2", INVALID_VALUE)
    with pytest.raises(DriverError, match="cuCtxPushCurrent_v2"):
        bench.uvm.is_managed(0x1000, 0)


def test_a_pointer_inside_an_allocation_leads_to_the_whole_of_it(bench):
    span = bench.uvm.allocate(3 * MIB, device=1)
    assert bench.uvm.allocation_of(span.pointer + 2 * MIB, 1) == span


def test_memory_info_and_driver_version(bench):
    bench.fake.capacity(10 * MIB)
    bench.uvm.allocate(4 * MIB, device=0)
    assert bench.uvm.memory_info(0) == (6 * MIB, 10 * MIB)
    assert bench.uvm.driver_version() == (13, 0)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (4096, 0, 0), (4096, -1, 0), (-4096, 1, 0), (4096, 1, -1)])
def test_a_span_that_cannot_be_is_not_made(numbers):
    with pytest.raises(ValueError, match="not a valid memory range"):
        ManagedSpan(*numbers)


@pytest.mark.parametrize("size", [0, -1, 1 << 64])
def test_a_size_that_cannot_be_is_not_allocated(bench, size):
    with pytest.raises(ValueError, match="cannot allocate"):
        bench.uvm.allocate(size, device=0)
    with pytest.raises(ValueError, match="invalid device, location, range or size"):
        bench.uvm.allocate(KIB, device=64)
    assert bench.fake.in_use == 0


def test_a_cap_that_cannot_be_is_not_set(bench):
    with pytest.raises(ValueError, match="not a number of bytes: -1"):
        bench.uvm.set_managed_cap(-1)
    assert bench.uvm.total_stats().cap_bytes == 4 * GIB


class TestOlderDrivers:
    def test_without_the_location_calls_the_old_ones_are_used(self, workshop):
        bench = workshop.bench("-DFAKE_NO_V2")
        span = bench.uvm.allocate(MIB, device=1)
        bench.uvm.advise(span, Advice.SET_PREFERRED_LOCATION, HOST)
        bench.uvm.advise(span, Advice.SET_ACCESSED_BY, 1)
        bench.uvm.prefetch(span, HOST, STREAM)
        assert bench.uvm.range_state(span) == RangeState(HOST, HOST, (1,), False)
        assert bench.fake.journal("cuMemAdvise ") == [
            f"cuMemAdvise bytes={MIB} advice=3 location=-1 -> 0",
            f"cuMemAdvise bytes={MIB} advice=5 location=1 -> 0",
        ]
        assert bench.fake.journal("cuMemPrefetchAsync ") == [
            f"cuMemPrefetchAsync bytes={MIB} advice=0 location=-1 stream={STREAM} -> 0"
        ]
        assert (bench.uvm.features.advise, bench.uvm.features.location_calls) == (True, False)

    def test_with_both_the_new_ones_are_used(self, bench):
        span = bench.uvm.allocate(MIB, device=0)
        bench.uvm.advise(span, Advice.SET_READ_MOSTLY)
        bench.uvm.prefetch(span, 0, STREAM)
        assert bench.fake.journal("cuMemAdvise ") == bench.fake.journal("cuMemPrefetchAsync ") == []
        assert bench.uvm.features.location_calls

    def test_the_new_ones_do_not_need_the_old_ones(self, workshop):
        bench = workshop.bench("-DFAKE_NO_V1")
        span = bench.uvm.allocate(MIB, device=0)
        bench.uvm.advise(span, Advice.SET_PREFERRED_LOCATION, HOST)
        bench.uvm.prefetch(span, HOST, STREAM)
        assert bench.uvm.range_state(span) == RangeState(HOST, HOST, (), False)

    def test_a_driver_with_only_the_bare_minimum_allocates_and_says_no_to_the_rest(self, workshop):
        bench = workshop.bench("-DFAKE_NO_OPTIONAL")
        span = bench.uvm.allocate(MIB, device=0)
        for function, act in FAILABLE.items():
            if function != "cuMemFree_v2":
                with pytest.raises(DriverTooOldError, match=function.removesuffix("_v2")):
                    act(bench.uvm, span)
        with pytest.raises(DriverTooOldError, match="cuPointerGetAttribute"):
            bench.uvm.is_managed(span.pointer, 0)
        with pytest.raises(DriverTooOldError, match="cuDriverGetVersion"):
            bench.uvm.driver_version()
        assert not any(vars(bench.uvm.features).values())
        assert bench.fake.open_contexts == 0
        bench.uvm.free(span)

    def test_a_slot_on_such_a_driver_counts_every_advice_it_could_not_give(self, workshop):
        bench = workshop.bench("-DFAKE_NO_OPTIONAL")
        bench.uvm.configure_slot(0, SlotPolicy(0, GIB, preferred="host", accessed_by_device=True))
        assert bench.slot().alloc(MIB) is not None
        stats = bench.uvm.slot_stats(0)
        assert stats.failed_advises == 2
        assert stats.last_error is not None
        assert (stats.last_error.name, stats.last_error.function) == ("UNAVAILABLE", "cuMemAdvise")


class TestCopies:
    """Host memory stands for both sides. The tests check which bytes go where, and how the driver is called."""

    def copy(self, bench, stream: int, count: int = 5) -> bool:
        sources = [
            ctypes.create_string_buffer(bytes([number + 1] * (number + 1)), number + 1) for number in range(count)
        ]
        targets = [ctypes.create_string_buffer(number + 1) for number in range(count)]
        bench.uvm.copy_batch(
            1, [*map(ctypes.addressof, targets)], [*map(ctypes.addressof, sources)], [*range(1, count + 1)], stream
        )
        return [target.raw for target in targets] == [source.raw for source in sources]

    def test_one_call_of_the_driver_for_all_of_them(self, bench):
        assert self.copy(bench, STREAM)
        (line,) = bench.fake.journal("cuMemcpy")
        assert line == "cuMemcpyBatchAsync_v2 count=5 source=2 target=1,1 -> 0"
        assert bench.fake.open_contexts == 0

    def test_older_drivers(self, workshop):
        bench = workshop.bench("-DFAKE_NO_V2")
        assert self.copy(bench, STREAM)
        (line,) = bench.fake.journal("cuMemcpy")
        assert line.startswith("cuMemcpyBatchAsync count=5")
        bench = workshop.bench("-DFAKE_NO_V1", "-DFAKE_NO_V2")
        assert self.copy(bench, STREAM)
        assert len(bench.fake.journal("cuMemcpyAsync")) == 5

    def test_the_default_stream_takes_them_one_by_one(self, bench):
        assert self.copy(bench, 0)
        assert len(bench.fake.journal("cuMemcpyAsync")) == 5

    def test_what_the_driver_rejects_is_told(self, bench):
        bench.fake.fail("cuMemcpyBatchAsync_v2", INVALID_VALUE)
        with pytest.raises(DriverError, match="cuMemcpyBatchAsync_v2"):
            self.copy(bench, STREAM)
        bench.fake.fail("cuMemcpyAsync", INVALID_VALUE, nth=3)
        with pytest.raises(DriverError, match="cuMemcpyAsync"):
            self.copy(bench, 0)
        assert len(bench.fake.journal("cuMemcpyAsync")) == 3, "nothing after the one that failed"
        assert bench.fake.open_contexts == 0

    def test_nonsense_never_reaches_the_driver(self, bench):
        nothing, empty, from_nowhere, to_nowhere = ([], [], []), ([1], [1], [0]), ([1], [0], [1]), ([0], [1], [1])
        for copies in (nothing, empty, from_nowhere, to_nowhere):
            with pytest.raises(ValueError, match="invalid device, location, range or size"):
                bench.uvm.copy_batch(0, *copies, STREAM)
        with pytest.raises(ValueError, match="1 targets, 1 sources and 0 sizes"):
            bench.uvm.copy_batch(0, [1], [1], [], STREAM)
        assert not bench.fake.journal("cuMemcpy")

    def test_a_driver_without_any_of_them(self, workshop):
        with pytest.raises(DriverTooOldError, match="cuMemcpyAsync"):
            self.copy(workshop.bench("-DFAKE_NO_OPTIONAL"), STREAM)
