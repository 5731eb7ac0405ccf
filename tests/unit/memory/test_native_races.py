"""Many threads on the same counters and caps. ctypes releases the GIL, so they really run in parallel."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.memory.errors import DriverError, ManagedCapError
from gracetune.memory.native import HOST, Advice, SlotPolicy
from gracetune.units import GIB, KIB

ROOT = Path(__file__).parents[3]
SHIM_SOURCE = ROOT / "src/gracetune/memory/native/uvm.c"
STRESS_SOURCE = ROOT / "tests/fixtures/fake_libcuda/stress.c"
THREADS = 6


@pytest.fixture(autouse=True)
def _switch_threads_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def storm(work, threads=THREADS):
    """Run `work(index)` on threads that start together. An exception in any of them fails the test."""
    barrier, raised = threading.Barrier(threads), []

    def body(index):
        barrier.wait()
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread below
            raised.append(error)

    crew = [threading.Thread(target=body, args=(index,)) for index in range(threads)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    if raised:
        raise raised[0]


def test_after_a_storm_every_counter_adds_up(bench):
    bench.fake.quiet()
    bench.fake.fail("cuMemAllocManaged", 2, nth=10, every=17)
    bench.fake.fail("cuMemAdvise_v2", 1, nth=5, every=23)
    bench.uvm.set_managed_cap(300 * KIB)
    for number in range(2):
        bench.uvm.configure_slot(number, SlotPolicy(0, 200 * KIB, preferred="host", accessed_by_device=True))
    got, rejected = [0] * THREADS, [0] * THREADS

    def work(index):
        rng, slot, held = random.Random(index), bench.slot(index % 2), []
        for _ in range(300):
            size = rng.randrange(1, 60 * KIB)
            if (pointer := slot.alloc(size)) is None:
                rejected[index] += 1
            else:
                got[index] += 1
                held.append((pointer, size))
            while len(held) > rng.randrange(4):
                slot.free(*held.pop(rng.randrange(len(held))))
        for pointer, size in held:
            slot.free(pointer, size)

    storm(work)
    total = bench.uvm.total_stats()
    assert (total.allocations, total.frees, total.refused) == (sum(got), sum(got), sum(rejected))
    assert total.refused_by_cap > 0
    assert total.refused_by_driver > 0
    assert total.failed_advises > 0
    for number in range(2):
        stats = bench.uvm.slot_stats(number)
        mine = range(number, THREADS, 2)
        assert (stats.live_bytes, stats.failed_frees, stats.refused_unusable) == (0, 0, 0)
        assert (stats.allocations, stats.frees) == (sum(got[i] for i in mine),) * 2
        assert stats.refused == sum(rejected[i] for i in mine)
        assert 0 < stats.peak_bytes <= 200 * KIB
    assert total.live_bytes == bench.fake.in_use == bench.fake.open_contexts == 0
    assert total.peak_bytes <= 300 * KIB
    assert bench.fake.most_in_use <= 300 * KIB


def test_racing_threads_fill_the_cap_to_the_byte_and_never_beyond(bench):
    bench.fake.quiet()
    block, room = 4 * KIB, 97
    bench.uvm.set_managed_cap(room * block + block - 1)
    bench.uvm.configure_slot(0, SlotPolicy(0, GIB))
    won = [0] * THREADS

    def work(index):
        for _ in range(room):
            if index % 2:
                won[index] += bench.slot().alloc(block) is not None
            else:
                try:
                    bench.uvm.allocate(block, device=0)
                except ManagedCapError:
                    continue
                won[index] += 1

    storm(work)
    assert sum(won) == room
    assert bench.fake.in_use == bench.fake.most_in_use == room * block == bench.uvm.total_stats().peak_bytes
    assert bench.uvm.total_stats().refused_by_cap == THREADS * room - room


def test_when_the_demand_is_exactly_the_cap_nobody_is_rejected(bench):
    bench.fake.quiet()
    bench.uvm.set_managed_cap(THREADS * 8 * KIB)
    bench.uvm.configure_slot(0, SlotPolicy(0, THREADS * 8 * KIB))

    def work(_index):
        for _ in range(200):
            pointer = bench.slot().alloc(8 * KIB)
            assert pointer is not None
            bench.slot().free(pointer, 8 * KIB)

    storm(work)
    assert bench.uvm.total_stats().refused == 0


def test_a_watcher_never_sees_more_live_bytes_than_the_cap(bench):
    bench.fake.quiet()
    cap = 64 * KIB
    bench.uvm.set_managed_cap(cap)
    bench.uvm.configure_slot(0, SlotPolicy(0, GIB))
    seen = []

    def work(index):
        if index == 0:
            seen.extend(bench.uvm.total_stats().live_bytes for _ in range(500))
            return
        for _ in range(300):
            pointer = bench.slot().alloc(20 * KIB)
            bench.slot().free(pointer, 20 * KIB)

    storm(work)
    assert max(seen) <= cap


def test_a_slot_reconfigured_in_the_middle_applies_one_policy_or_the_other_never_a_mixture(bench):
    host = SlotPolicy(0, GIB, preferred="host", accessed_by_device=True)
    device = SlotPolicy(1, GIB, preferred="device", read_mostly=True)
    bench.uvm.configure_slot(0, host)
    pointers, finished = [[] for _ in range(THREADS)], queue.SimpleQueue()

    def work(index):
        if index == 0:
            while finished.qsize() < THREADS - 1:
                bench.uvm.configure_slot(0, host)
                bench.uvm.configure_slot(0, device)
            return
        while len({target for _, target in pointers[index]}) < 2 or len(pointers[index]) < 100:
            for target in (0, 1):
                if (pointer := bench.slot().alloc(KIB, device=target)) is not None:
                    pointers[index].append((pointer, target))
        finished.put(index)

    storm(work)
    states = {0: (HOST, (0,), False), 1: (1, (), True)}
    for pointer, target in (one for some in pointers for one in some):
        state = bench.uvm.range_state(bench.uvm.allocation_of(pointer, target))
        assert (state.preferred, state.accessed_by, state.read_mostly) == states[target]


def test_threads_that_meet_a_device_for_the_first_time_together_keep_one_context(bench):
    bench.fake.meet("cuDevicePrimaryCtxRetain", THREADS)
    storm(lambda _index: bench.uvm.memory_info(1))
    assert len(bench.fake.journal("cuDevicePrimaryCtxRetain")) == THREADS, "all of them saw that there was none yet"
    assert bench.fake.retained == 1
    assert bench.fake.open_contexts == 0


def test_the_cap_counts_what_other_threads_are_just_asking_the_driver_for(bench):
    bench.uvm.set_managed_cap(2 * 8 * KIB)
    bench.uvm.memory_info(0)
    bench.fake.meet("cuMemAllocManaged", 2)
    spans, rejected = queue.SimpleQueue(), queue.SimpleQueue()

    def work(_index):
        try:
            spans.put(bench.uvm.allocate(8 * KIB, device=0))
        except ManagedCapError:
            rejected.put(True)

    storm(work)
    assert (spans.qsize(), rejected.qsize()) == (2, THREADS - 2)
    assert bench.fake.most_in_use == 2 * 8 * KIB


def test_a_storm_in_c_where_no_interpreter_slows_the_threads_down(workshop):
    program = workshop.program(STRESS_SOURCE, f"-I{SHIM_SOURCE.parent}")
    done = subprocess.run([program, workshop.fake().path, "4", "5000", "quiet"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all accounted for" in done.stdout


def test_hints_from_many_threads_are_all_made_and_balanced(bench):
    spans = [bench.uvm.allocate(64 * KIB, device=0) for _ in range(THREADS)]
    bench.fake.clear()

    def work(index):
        for _ in range(50):
            bench.uvm.advise(spans[index], Advice.SET_PREFERRED_LOCATION, HOST)
            bench.uvm.prefetch(spans[index], 0, 0x10 + index)

    storm(work)
    assert len(bench.fake.journal("cuMemAdvise_v2")) == len(bench.fake.journal("cuMemPrefetchAsync_v2")) == 50 * THREADS
    assert all(line.endswith("-> 0") for line in bench.fake.journal())
    assert bench.fake.open_contexts == 0


def test_each_thread_is_told_its_own_failure(bench):
    span = bench.uvm.allocate(64 * KIB, device=0)
    acts = [
        ("cuMemAdvise_v2", lambda: bench.uvm.advise(span, Advice.SET_READ_MOSTLY)),
        ("cuMemPrefetchAsync_v2", lambda: bench.uvm.prefetch(span, 0, 0)),
    ]
    for function, _ in acts:
        bench.fake.fail(function, 719, nth=1, every=1)

    def work(index):
        function, act = acts[index % 2]
        for _ in range(100):
            with pytest.raises(DriverError) as caught:
                act()
            assert caught.value.function == function

    storm(work)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("cap"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("slot cap"), st.integers(0, 1), st.integers(0, 30)),
    ),
    max_size=60,
)


def test_any_sequence_of_allocations_frees_and_caps_agrees_with_a_plain_model(workshop):
    bench = workshop.bench()

    @settings(max_examples=150, deadline=None)
    @given(ACTIONS)
    def check(actions):
        caps, cap, held = {0: 20 * KIB, 1: 20 * KIB, 2: 1 << 62}, 40 * KIB, []
        bench.uvm.set_managed_cap(cap)
        for number in (0, 1):
            bench.uvm.configure_slot(number, SlotPolicy(0, caps[number]))
        for action, first, second in actions:
            if action == "cap":
                cap = first * KIB
                bench.uvm.set_managed_cap(cap)
            elif action == "slot cap":
                caps[first] = second * KIB
                bench.uvm.configure_slot(first, SlotPolicy(0, caps[first]))
            elif action == "free" and held:
                give_back(*held.pop(first % len(held)))
            elif action == "alloc":
                size = second * KIB
                live = {number: sum(s for n, _, s in held if n == number) for number in caps}
                fits = live[first] + size <= caps[first] and sum(live.values()) + size <= cap
                pointer = ask(first, size)
                assert (pointer is not None) == fits
                if pointer is not None:
                    held.append((first, pointer, size))
            assert bench.uvm.total_stats().live_bytes == sum(size for _, _, size in held) == bench.fake.in_use
        while held:
            give_back(*held.pop())
        assert bench.uvm.total_stats().live_bytes == bench.fake.in_use == bench.fake.open_contexts == 0

    def ask(account, size):
        if account < 2:
            return bench.slot(account).alloc(size)
        try:
            return bench.uvm.allocate(size, device=0)
        except ManagedCapError:
            return None

    def give_back(account, pointer, size):
        if account < 2:
            bench.slot(account).free(pointer, size)
        else:
            bench.uvm.free(pointer)

    check()
