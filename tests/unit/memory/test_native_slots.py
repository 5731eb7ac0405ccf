"""Allocator slots: results for PyTorch, calls of the driver, and counters."""

from __future__ import annotations

import ctypes

import pytest

from gracetune.memory.native import SlotPolicy
from gracetune.units import GIB, KIB, MIB

OUT_OF_MEMORY, INVALID_VALUE, INVALID_CONTEXT = 2, 1, 201
PLAIN = SlotPolicy(device=0, cap_bytes=GIB)


def calls(bench, prefix="cu"):
    """Names and arguments of the calls in order, without those that manage contexts."""
    return [line for line in bench.fake.journal(prefix) if not line.startswith(("cuCtx", "cuDevice", "cuInit"))]


def test_a_slot_is_off_until_it_is_configured(bench):
    assert bench.slot().alloc(MIB) is None
    stats = bench.uvm.slot_stats(0)
    assert (stats.refused, stats.refused_unusable, stats.live_bytes) == (1, 1, 0)
    assert stats.last_error is not None
    assert stats.last_error.name == "SLOT_DISABLED"
    assert calls(bench) == []


def test_memory_from_a_slot_can_be_written_and_is_counted_until_it_is_freed(bench):
    bench.uvm.configure_slot(0, PLAIN)
    slot = bench.slot()
    pointer = slot.alloc(3 * MIB)
    ctypes.memset(pointer, 0xA5, 3 * MIB)
    assert ctypes.string_at(pointer + 3 * MIB - 1, 1) == b"\xa5"
    during = bench.uvm.slot_stats(0)
    slot.free(pointer, 3 * MIB)
    after = bench.uvm.slot_stats(0)
    assert (during.live_bytes, during.peak_bytes, during.allocations, during.frees) == (3 * MIB, 3 * MIB, 1, 0)
    assert (after.live_bytes, after.peak_bytes, after.allocations, after.frees) == (0, 3 * MIB, 1, 1)
    assert bench.fake.in_use == 0
    assert after.last_error is None


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        (SlotPolicy(0, GIB), []),
        (SlotPolicy(0, GIB, preferred="device"), ["advice=3 location=0"]),
        (SlotPolicy(0, GIB, preferred="none", accessed_by_device=True), ["advice=5 location=0"]),
        (
            SlotPolicy(0, GIB, preferred="host", accessed_by_device=True),
            ["advice=3 location=-1", "advice=5 location=0"],
        ),
        (
            SlotPolicy(0, GIB, preferred="host", accessed_by_device=True, read_mostly=True),
            ["advice=3 location=-1", "advice=5 location=0", "advice=1 location=0"],
        ),
    ],
)
def test_the_policy_reaches_the_driver_in_this_order_and_nothing_else_does(bench, policy, advice):
    bench.uvm.configure_slot(3, policy)
    bench.fake.clear()
    bench.slot(3).alloc(2 * MIB)
    expected = [f"cuMemAllocManaged bytes={2 * MIB} -> 0"]
    expected += [f"cuMemAdvise_v2 bytes={2 * MIB} {one} -> 0" for one in advice]
    assert calls(bench) == expected


def test_the_whole_allocation_runs_inside_one_pushed_context(bench):
    bench.uvm.configure_slot(0, SlotPolicy(1, GIB, preferred="host", accessed_by_device=True))
    bench.fake.clear()
    bench.slot().alloc(MIB, device=1)
    names = [line.split()[0] for line in bench.fake.journal()]
    assert names == [
        "cuCtxPushCurrent_v2",
        "cuMemAllocManaged",
        "cuMemAdvise_v2",
        "cuMemAdvise_v2",
        "cuCtxPopCurrent_v2",
    ]
    assert "device=1" in bench.fake.journal("cuCtxPush")[0]


def test_the_context_is_opened_when_the_slot_is_configured_and_only_once(bench):
    bench.uvm.configure_slot(0, PLAIN)
    assert bench.fake.retained == 1
    bench.uvm.configure_slot(1, PLAIN)
    bench.slot(0).alloc(MIB)
    bench.slot(1).alloc(MIB)
    assert bench.fake.retained == 1


def test_slots_do_not_share_their_counters(bench):
    for number in range(bench.uvm.slot_count):
        bench.uvm.configure_slot(number, PLAIN)
        assert bench.slot(number).alloc((number + 1) * KIB) is not None
    live = [bench.uvm.slot_stats(number).live_bytes for number in range(bench.uvm.slot_count)]
    assert live == [(number + 1) * KIB for number in range(bench.uvm.slot_count)]
    assert bench.uvm.total_stats().live_bytes == sum(live)


def test_a_slot_stops_exactly_at_its_cap(bench):
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=3 * MIB))
    slot = bench.slot()
    assert slot.alloc(2 * MIB) is not None
    assert slot.alloc(MIB + 1) is None
    last = slot.alloc(MIB)
    assert last is not None
    assert slot.alloc(1) is None
    slot.free(last, MIB)
    assert slot.alloc(MIB) is not None
    stats = bench.uvm.slot_stats(0)
    assert (stats.refused_by_cap, stats.refused, stats.live_bytes) == (2, 2, 3 * MIB)
    assert stats.last_error is not None
    assert stats.last_error.name == "CAP"


def test_a_size_near_the_end_of_the_number_range_does_not_slip_under_the_cap(bench):
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=3 * MIB))
    assert bench.slot().alloc(MIB) is not None
    assert bench.slot().alloc((1 << 64) - MIB) is None
    stats = bench.uvm.slot_stats(0)
    assert (stats.live_bytes, stats.refused_by_cap, stats.refused_by_driver) == (MIB, 1, 0)


def test_a_cap_lowered_below_what_is_live_rejects_until_enough_is_freed(bench):
    bench.uvm.configure_slot(0, PLAIN)
    slot = bench.slot()
    first, second = slot.alloc(4 * MIB), slot.alloc(4 * MIB)
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=5 * MIB))
    assert slot.alloc(KIB) is None
    slot.free(first, 4 * MIB)
    assert slot.alloc(MIB) is not None
    slot.free(second, 4 * MIB)


def test_the_process_cap_holds_over_slots_and_direct_allocations_together(bench):
    bench.uvm.set_managed_cap(4 * MIB)
    bench.uvm.configure_slot(0, PLAIN)
    bench.uvm.configure_slot(1, PLAIN)
    bench.uvm.allocate(MIB, device=0)
    assert bench.slot(0).alloc(2 * MIB) is not None
    assert bench.slot(1).alloc(MIB + 1) is None
    assert bench.slot(1).alloc(MIB) is not None
    total = bench.uvm.total_stats()
    assert (total.live_bytes, total.cap_bytes, total.refused_by_cap) == (4 * MIB, 4 * MIB, 1)
    assert bench.fake.in_use == 4 * MIB


def test_without_being_told_the_process_cap_is_4_gib(bench):
    assert bench.uvm.total_stats().cap_bytes == 4 * GIB
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=100 * GIB))
    assert bench.slot().alloc(4 * GIB + 1) is None
    bench.uvm.set_managed_cap(None)
    assert bench.uvm.total_stats().cap_bytes is None
    assert bench.slot().alloc(4 * GIB + 1) is not None


def test_a_process_cap_that_rejects_leaves_the_slots_room_untouched(bench):
    bench.uvm.set_managed_cap(MIB)
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=8 * MIB))
    for _ in range(20):
        assert bench.slot().alloc(8 * MIB) is None
    bench.uvm.set_managed_cap(GIB)
    assert bench.slot().alloc(8 * MIB) is not None


def test_a_driver_that_is_out_of_memory_gives_null_and_nothing_is_counted_as_live(bench):
    bench.fake.capacity(4 * MIB)
    bench.uvm.configure_slot(0, PLAIN)
    assert bench.slot().alloc(5 * MIB) is None
    stats = bench.uvm.slot_stats(0)
    assert (stats.refused_by_driver, stats.live_bytes, stats.peak_bytes, stats.allocations) == (1, 0, 0, 0)
    assert stats.last_error is not None
    assert (stats.last_error.code, stats.last_error.function) == (OUT_OF_MEMORY, "cuMemAllocManaged")
    assert bench.slot().alloc(4 * MIB) is not None


def test_a_rejection_of_ours_is_not_blamed_on_the_function_that_failed_before_it(bench):
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=MIB))
    bench.fake.fail("cuMemAllocManaged", OUT_OF_MEMORY)
    assert bench.slot().alloc(MIB) is None
    assert bench.slot().alloc(2 * MIB) is None
    error = bench.uvm.slot_stats(0).last_error
    assert error is not None
    assert (error.name, error.function) == ("CAP", "")


@pytest.mark.parametrize("function", ["cuCtxPushCurrent_v2", "cuMemAllocManaged", "cuCtxPopCurrent_v2"])
def test_whichever_call_of_an_allocation_fails_nothing_leaks(bench, function):
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=MIB))
    bench.fake.fail(function, 999)
    assert bench.slot().alloc(MIB) is None
    stats = bench.uvm.slot_stats(0)
    assert (stats.refused_by_driver, stats.live_bytes, bench.fake.in_use) == (1, 0, 0)
    assert stats.last_error is not None
    assert (stats.last_error.code, stats.last_error.function) == (999, function)
    assert bench.slot().alloc(MIB) is not None, "the refused bytes must not stay reserved"


def test_memory_that_could_neither_be_handed_out_nor_freed_stays_counted_against_the_cap(bench):
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=2 * MIB))
    bench.fake.fail("cuCtxPopCurrent_v2", INVALID_CONTEXT)
    bench.fake.fail("cuMemFree_v2", INVALID_VALUE)
    assert bench.slot().alloc(MIB) is None
    assert bench.fake.in_use == MIB
    assert bench.slot().alloc(2 * MIB) is None
    assert bench.slot().alloc(MIB) is not None
    assert bench.uvm.slot_stats(0).failed_frees == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_advice_that_fails_is_counted_and_the_memory_still_handed_out(bench, nth):
    bench.uvm.configure_slot(0, SlotPolicy(0, GIB, preferred="host", accessed_by_device=True, read_mostly=True))
    bench.fake.fail("cuMemAdvise_v2", INVALID_VALUE, nth=nth)
    pointer = bench.slot().alloc(MIB)
    assert pointer is not None
    stats = bench.uvm.slot_stats(0)
    assert (stats.failed_advises, stats.refused, stats.live_bytes) == (1, 0, MIB)
    assert stats.last_error is not None
    assert (stats.last_error.code, stats.last_error.function) == (INVALID_VALUE, "cuMemAdvise_v2")
    assert len(bench.fake.journal("cuMemAdvise_v2")) == 3, "one refusal does not stop the other advice"
    assert bench.fake.open_contexts == 0


def test_memory_the_driver_will_not_free_stays_counted(bench):
    bench.uvm.configure_slot(0, SlotPolicy(0, cap_bytes=MIB))
    pointer = bench.slot().alloc(MIB)
    bench.fake.fail("cuMemFree_v2", INVALID_VALUE)
    bench.slot().free(pointer, MIB)
    stats = bench.uvm.slot_stats(0)
    assert (stats.live_bytes, stats.frees, stats.failed_frees) == (MIB, 0, 1)
    assert bench.slot().alloc(1) is None
    bench.slot().free(pointer, MIB)
    assert bench.uvm.slot_stats(0).live_bytes == bench.fake.in_use == 0


def test_freed_memory_is_counted_as_freed_even_if_the_context_then_cannot_be_popped(bench):
    bench.uvm.configure_slot(0, PLAIN)
    pointer = bench.slot().alloc(MIB)
    bench.fake.fail("cuCtxPopCurrent_v2", INVALID_CONTEXT)
    bench.slot().free(pointer, MIB)
    stats = bench.uvm.slot_stats(0)
    assert (stats.live_bytes, stats.frees, stats.failed_frees, bench.fake.in_use) == (0, 1, 0, 0)
    assert stats.last_error is not None
    assert stats.last_error.function == "cuCtxPopCurrent_v2"


def test_freeing_null_is_nothing(bench):
    bench.uvm.configure_slot(0, PLAIN)
    bench.slot().free(None, MIB)
    stats = bench.uvm.slot_stats(0)
    assert (stats.frees, stats.failed_frees, stats.live_bytes) == (0, 0, 0)


def test_another_device_than_the_configured_one_is_rejected_before_the_driver_is_asked(bench):
    bench.uvm.configure_slot(0, PLAIN)
    bench.fake.clear()
    assert bench.slot().alloc(MIB, device=1) is None
    stats = bench.uvm.slot_stats(0)
    assert stats.refused_unusable == 1
    assert stats.last_error is not None
    assert stats.last_error.name == "SLOT_DEVICE"
    assert bench.fake.journal() == []


def test_nothing_is_handed_out_for_no_bytes(bench):
    bench.uvm.configure_slot(0, PLAIN)
    assert bench.slot().alloc(0) is None
    assert bench.uvm.slot_stats(0).refused_unusable == 1


def test_a_disabled_slot_rejects_but_still_takes_its_memory_back(bench):
    bench.uvm.configure_slot(0, PLAIN)
    pointer = bench.slot().alloc(MIB)
    bench.uvm.disable_slot(0)
    assert bench.slot().alloc(MIB) is None
    bench.slot().free(pointer, MIB)
    assert bench.uvm.slot_stats(0).live_bytes == bench.fake.in_use == 0


def test_the_symbols_a_slot_names_are_the_exported_ones(bench):
    library = ctypes.CDLL(str(bench.uvm.path))
    for number in range(bench.uvm.slot_count):
        symbols = bench.uvm.slot_symbols(number)
        assert symbols.library == bench.uvm.path
        assert library[symbols.alloc]
        assert library[symbols.free]
    with pytest.raises(ValueError, match="no slot 8: there are 8"):
        bench.uvm.slot_symbols(8)
