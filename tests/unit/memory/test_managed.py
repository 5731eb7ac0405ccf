"""Managed buffers on a fake driver with real memory; only the GPU is missing."""

from __future__ import annotations

import gc
import os
import random
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.hostmem.hint import HINT_PAGE, ByteRange, whole_pages
from gracetune.memory.errors import DriverError, ManagedCapError, UnifiedMemoryError
from gracetune.memory.managed import ALIGNMENT, FreeSpace, ManagedBuffer, ManagedHeap
from gracetune.memory.native import HOST
from gracetune.memory.tensor_hints import prefer
from gracetune.units import MIB


class Quiesced:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def quiesced() -> Quiesced:
    return Quiesced()


@pytest.fixture
def heap(bench, quiesced: Quiesced) -> ManagedHeap:
    return ManagedHeap(bench.uvm, 0, quiesced, slab_bytes=1 * MIB)


def test_the_cpu_view_is_the_buffer_itself(heap: ManagedHeap) -> None:
    buffer = heap.empty((3, 5), torch.float32)
    buffer.cpu().copy_(torch.arange(15).view(3, 5))
    assert buffer.cpu().tolist() == torch.arange(15.0).view(3, 5).tolist()
    assert buffer.cpu().data_ptr() == buffer.span.pointer


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_every_dtype_has_a_view(heap: ManagedHeap, dtype: torch.dtype) -> None:
    view = heap.empty((4, 2), dtype).cpu()
    assert (view.dtype, tuple(view.shape)) == (dtype, (4, 2))


def test_home_is_told_to_the_driver_when_the_slab_is_made(heap: ManagedHeap, bench) -> None:
    host, device = heap.empty((HINT_PAGE,), torch.uint8), heap.empty((HINT_PAGE,), torch.uint8, "device")
    assert host.state().preferred == HOST
    assert device.state().preferred == 0
    assert host.state().accessed_by == device.state().accessed_by == (0,)


def test_freed_when_the_last_view_is_gone(heap: ManagedHeap, bench) -> None:
    buffer = heap.empty((100,), torch.float32)
    view = buffer.cpu()[10:20]
    buffer.close()
    del buffer
    view.fill_(7.0)
    assert bench.fake.in_use > 0
    assert view.sum().item() == 70.0
    del view
    assert bench.fake.in_use == heap.held_bytes == 0


def test_a_closed_buffer_says_so(heap: ManagedHeap) -> None:
    with heap.empty((8,), torch.uint8) as buffer:
        buffer.cpu().zero_()
    with pytest.raises(UnifiedMemoryError, match="closed"):
        buffer.cpu()


def test_the_gpu_is_waited_for_only_if_it_was_given_the_bytes(heap: ManagedHeap, quiesced: Quiesced) -> None:
    heap.empty((HINT_PAGE,), torch.uint8).close()
    assert quiesced.times == 0
    buffer = heap.empty((HINT_PAGE,), torch.uint8)
    buffer.prefetch("device", stream=2)
    buffer.close()
    assert quiesced.times == 1


def test_the_host_section_waits_for_the_gpu(heap: ManagedHeap, quiesced: Quiesced) -> None:
    with heap.empty((4,), torch.int64).host() as view:
        assert quiesced.times == 1
        view.fill_(3)


def test_small_buffers_share_a_slab_and_paged_ones_have_their_pages(heap: ManagedHeap, bench) -> None:
    small = [heap.empty((100,), torch.uint8) for _ in range(10)]
    paged = [heap.empty((HINT_PAGE + 1,), torch.uint8) for _ in range(3)]
    assert len(bench.fake.journal("cuMemAllocManaged")) == 2
    assert all(buffer.span.pointer % ALIGNMENT == 0 for buffer in small)
    pages = [set(range(b.span.pointer // HINT_PAGE, -(-(b.span.pointer + b.span.bytes) // HINT_PAGE))) for b in paged]
    assert not (pages[0] & pages[1] | pages[0] & pages[2] | pages[1] & pages[2])


def test_a_small_buffer_cannot_change_what_its_neighbours_were_promised(heap: ManagedHeap) -> None:
    hint = heap.empty((100,), torch.uint8).rehome("device")
    assert not hint
    assert "share" in hint.reason
    assert (heap.hints.bytes, heap.hints.refused) == (ALIGNMENT, 1), "the first home was told, the second was not"


def test_hints_are_undone_when_bytes_are_recycled(heap: ManagedHeap) -> None:
    first, keep = heap.empty((HINT_PAGE,), torch.uint8), heap.empty((HINT_PAGE,), torch.uint8)
    place = first.span.pointer
    assert first.rehome("device")
    assert first.state().preferred == 0
    assert keep.state().preferred == HOST
    first.close()
    del first
    again = heap.empty((HINT_PAGE,), torch.uint8)
    assert again.span.pointer == place
    assert again.state().preferred == HOST


def test_prefetch_is_recorded_by_the_driver(heap: ManagedHeap) -> None:
    buffer = heap.empty((HINT_PAGE,), torch.uint8)
    assert buffer.prefetch("device", stream=2).bytes == HINT_PAGE
    assert buffer.state().last_prefetch == 0
    buffer.prefetch("host", stream=2)
    assert buffer.state().last_prefetch == HOST


def test_failures_leave_nothing_behind(heap: ManagedHeap, bench) -> None:
    bench.fake.fail("cuMemAdvise_v2", 801, nth=2)
    with pytest.raises(DriverError, match="cuMemAdvise_v2"):
        heap.empty((10,), torch.uint8)
    assert bench.fake.in_use == heap.held_bytes == 0
    bench.uvm.set_managed_cap(1 * MIB)
    with pytest.raises(ManagedCapError):
        heap.empty((2 * MIB,), torch.uint8)
    assert heap.empty((10,), torch.uint8).cpu().numel() == 10


@pytest.mark.parametrize(("shape", "home"), [((0,), "host"), ((2, -1), "host"), ((3,), "gpu")])
def test_nonsense_is_rejected(heap: ManagedHeap, shape: tuple[int, ...], home: str) -> None:
    with pytest.raises(ValueError, match=r"home|no bytes"):
        heap.empty(shape, torch.uint8, home)  # type: ignore[arg-type]


def test_a_forked_child_is_rejected(heap: ManagedHeap) -> None:
    buffer = heap.empty((10,), torch.uint8)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            buffer.cpu()
            stated = "no error"
        except UnifiedMemoryError as error:
            stated = type(error).__name__
        os.write(write, stated.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"UsedAfterForkError"
    assert buffer.cpu().numel() == 10


def test_threads_allocating_and_dropping_keep_their_bytes_apart(heap: ManagedHeap, bench) -> None:
    def churn(seed: int) -> None:
        rng, held = random.Random(seed), []
        for _ in range(150):
            size = rng.choice([16, 700, HINT_PAGE, 3 * HINT_PAGE])
            buffer: ManagedBuffer = heap.empty((size,), torch.uint8, rng.choice(["host", "device"]))
            mark = rng.randrange(256)
            buffer.cpu().fill_(mark)
            held.append((buffer, mark))
            if len(held) > 6:
                dropped, value = held.pop(rng.randrange(len(held)))
                wrong.extend([seed] if dropped.cpu().ne(value).any() else [])

    wrong: list[int] = []
    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert wrong == []
    assert heap.held_bytes == bench.fake.in_use == 0


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from([1, 16, 64]), st.booleans()), max_size=60))
def test_free_space_never_hands_out_a_byte_twice(requests: list[tuple[int, int, bool]]) -> None:
    space, held = FreeSpace(40, 2048), []
    for size, alignment, drop in requests:
        if drop and held:
            space.give_back(*held.pop(0))
        offset = space.take(size, alignment)
        if offset is not None:
            assert offset % alignment == 0
            assert all(offset + size <= other or other + length <= offset for other, length in held)
            held.append((offset, size))
        assert space.free_bytes == 2048 - sum(length for _, length in held)
    for chunk in held:
        space.give_back(*chunk)
    assert space.is_empty
    assert space.ranges == [(40, 2048)]


def test_garbage_collected_in_the_middle_of_the_heaps_own_work(heap: ManagedHeap) -> None:
    """Buffers in reference cycles are freed when the collector runs, often in the middle of an allocation."""

    class Cycle:
        def __init__(self, buffer: ManagedBuffer) -> None:
            self.buffer, self.me = buffer, self

    rng, live, before = random.Random(0), [], gc.get_threshold()
    try:
        for _ in range(4000):
            gc.set_threshold(rng.randrange(2, 60), 1, 1)
            buffer = heap.empty((rng.choice([16, 700, 3000]),), torch.uint8)
            if rng.random() < 0.5:
                Cycle(buffer)
            else:
                live.append(buffer)
            del live[: max(0, len(live) - 30)]
            spans = sorted((item.span.pointer, item.span.pointer + item.span.bytes) for item in live)
            assert all(first[1] <= second[0] for first, second in pairwise(spans))
    finally:
        gc.set_threshold(*before)
    live.clear()
    del buffer
    gc.collect()
    assert heap.held_bytes == 0


def test_one_wait_for_the_gpu_serves_all_that_is_given_back(heap: ManagedHeap, quiesced: Quiesced) -> None:
    buffers = [heap.empty((HINT_PAGE,), torch.uint8) for _ in range(8)]
    for buffer in buffers:
        buffer.prefetch("device", stream=2)
    with heap._lock:  # as if another thread were at work: finalizers only take note
        buffers.clear()
        del buffer
    assert quiesced.times == 0
    assert heap.held_bytes == 0
    assert quiesced.times == 1


def test_a_gpu_that_cannot_be_waited_for_loses_nothing(bench) -> None:
    broken = [RuntimeError("device lost")]

    def wait() -> None:
        if broken:
            raise broken[0]

    heap = ManagedHeap(bench.uvm, 0, wait)
    buffer = heap.empty((HINT_PAGE,), torch.uint8)
    buffer.prefetch("device", stream=2)
    with heap._lock:
        buffer.close()
    with pytest.raises(RuntimeError, match="device lost"):
        _ = heap.held_bytes
    broken.clear()
    assert heap.held_bytes == 0


def test_a_forked_child_ends_quietly(heap: ManagedHeap) -> None:
    buffer = heap.empty((10,), torch.uint8)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        buffer.close()
        del buffer
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 1000) == b""
    assert buffer.cpu().numel() == 10


def test_hints_given_through_a_tensor_are_undone_too(heap: ManagedHeap) -> None:
    first, keep = heap.empty((HINT_PAGE,), torch.uint8), heap.empty((HINT_PAGE,), torch.uint8)
    place = first.span.pointer
    assert prefer(heap.uvm, first.cpu(), "device")
    first.close()
    del first
    again = heap.empty((HINT_PAGE,), torch.uint8)
    assert (again.span.pointer, again.state().preferred) == (place, HOST)
    assert keep.cpu().numel() == HINT_PAGE


def test_bytes_cannot_be_given_back_twice() -> None:
    space = FreeSpace(0, 100)
    space.take(10, 1)
    space.give_back(0, 10)
    with pytest.raises(ValueError, match="already free"):
        space.give_back(0, 10)
    assert space.ranges == [(0, 100)]


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40), st.integers(1, 40))
def test_a_hint_touches_no_page_that_holds_anothers_bytes(base: int, size: int, skip: int, length: int) -> None:
    allocation = ByteRange(base, size)
    wanted = ByteRange(base + skip % size, min(length, size - skip % size))
    pages = whole_pages(wanted, allocation, page=8)
    if pages is None:
        return
    # The driver rounds outwards to whole pages; every byte of those pages is ours or no one's.
    touched = range(pages.start // 8 * 8, -(-pages.end // 8) * 8)
    theirs = [
        byte for byte in touched if allocation.start <= byte < allocation.end and not wanted.start <= byte < wanted.end
    ]
    assert theirs == []


def test_cold_buffers_are_sent_home_oldest_first_and_only_as_many_as_fit(heap: ManagedHeap, bench) -> None:
    first, second, third = (heap.empty((HINT_PAGE,), torch.uint8, "device") for _ in range(3))
    for buffer in (second, first):
        buffer.prefetch("device", stream=2)
    heap.demote_cold(at_most=10 * HINT_PAGE, include_recent=False)
    assert first.state().last_prefetch == 0, "used a moment ago, so not cold"
    heap.demote_cold(at_most=HINT_PAGE, include_recent=True)
    assert second.state().last_prefetch == HOST
    assert first.state().last_prefetch == 0
    heap.demote_cold(at_most=10 * HINT_PAGE, include_recent=True)
    assert first.state().last_prefetch == HOST
    assert third.state().last_prefetch is None, "never brought to the GPU, so nothing to send back"
    bench.fake.clear()
    heap.demote_cold(at_most=10 * HINT_PAGE, include_recent=True)
    assert bench.fake.journal("cuMemPrefetch") == []
