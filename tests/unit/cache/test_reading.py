"""Bulk reads: entries are read and verified correctly, whatever the selection and the order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.cache.errors import CorruptEntryError
from gracetune.cache.keys import EntryOrigin, Key
from gracetune.cache.manifest import EntryTable, merge
from gracetune.cache.reading import STRETCH, jobs, stretches
from gracetune.cache.shards import RUN
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from unit.cache.sample_caches import places_of

COUNT = 30
ORIGINS = [EntryOrigin("latent", f"{number:032x}", ()) for number in range(COUNT)]
NUMBER = {origin.key: number for number, origin in enumerate(ORIGINS)}


def content(number: int) -> torch.Tensor:
    """Entries from 64 bytes to a third of a run, and one larger than a run."""
    size = RUN + 64 if number == 17 else 64 << (number * 7 % 13)
    return torch.full((size,), number, dtype=torch.uint8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskStore]:
    with DiskStore.open(tmp_path_factory.mktemp("reading") / "cache", writable=True) as store:
        with store.writer(Flush(entries=COUNT // 2)) as writer:
            for number, origin in enumerate(ORIGINS):
                writer.add(origin, {"x": content(number)})
        yield store


def test_whole_runs_are_checked_at_once(store: DiskStore) -> None:
    plan = store.locate([*NUMBER])
    ends = np.cumsum(plan.sizes)
    found = jobs(plan, ends - plan.sizes)
    assert [(one.first, one.end) for one in found if one.end - one.first == 1 and one.checksum] == []
    in_runs = sum(one.end - one.first for one in found if one.checksum is not None)
    assert in_runs >= COUNT - 6
    assert len(found) < COUNT / 2


def test_part_of_a_run_is_checked_entry_by_entry(store: DiskStore) -> None:
    plan = store.locate([*NUMBER][::2])
    found = jobs(plan, np.cumsum(plan.sizes) - plan.sizes)
    assert all(one.checksum is None for one in found)


@given(st.integers(0, 2000), st.integers(1, 72))
def test_threads_take_neighbours_and_none_is_left_without(store: DiskStore, count: int, threads: int) -> None:
    plan = store.locate([*NUMBER][:1])
    (one,) = jobs(plan, np.zeros(1, np.int64))
    some = [one._replace(first=number) for number in range(count)]
    taken = stretches(some, threads)
    assert [job for stretch in taken for job in stretch] == some
    assert len(taken) >= min(threads, count)
    assert {len(stretch) for stretch in [*taken][:-1]} <= {STRETCH} or count < 4 * threads * STRETCH


@given(st.lists(st.sampled_from([*NUMBER]), unique=True), st.data())
def test_a_plan_knows_its_keys_in_order(store: DiskStore, keys: list[Key], data: st.DataObject) -> None:
    plan = store.locate(keys)
    assert [plan.keys[row] for row in plan.by_key.tolist()] == sorted(keys)
    found = [(copy.shard, copy.start) for copy in places_of(plan)]
    assert found == sorted(found, key=lambda at: (plan.files.index(at[0]), at[1]))
    part = plan.part(np.array(data.draw(st.lists(st.booleans(), min_size=len(plan), max_size=len(plan))), np.bool_))
    assert [part.keys[row] for row in part.by_key.tolist()] == sorted(part.keys)


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8), max_size=4))
def test_keys_that_share_a_half_are_kept_apart(tables: list[list[tuple[int, int]]]) -> None:
    def table(keys: list[tuple[int, int]]) -> EntryTable:
        rows = np.array(sorted(keys), np.uint64).reshape(-1, 2)
        zeros = np.zeros(len(keys), np.uint32)
        return EntryTable(rows[:, 0].copy(), rows[:, 1].copy(), zeros, zeros, rows[:, 0], rows[:, 1])

    merged = merge([table(keys) for keys in tables])
    assert [*zip(merged.high.tolist(), merged.low.tolist(), strict=True)] == sorted(
        key for keys in tables for key in keys
    )
    assert merged.checksum.tolist() == merged.low.tolist(), "the other columns go with their key"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*NUMBER]), unique=True), st.integers(0, 2), st.integers(1, 3))
def test_any_part_to_any_place(store: DiskStore, keys: list[Key], order: int, threads: int) -> None:
    plan = store.locate(keys)
    offsets = np.cumsum(plan.sizes) - plan.sizes
    if order == 1:  # backwards: nothing lies side by side in the slab
        offsets = plan.total - np.cumsum(plan.sizes)
    if order == 2:  # with a gap in the middle of what lies side by side
        offsets = offsets + 64 * (np.arange(len(plan)) > len(plan) // 2)
    covered = [number for job in jobs(plan, offsets) for number in range(job.first, job.end)]
    assert covered == [*range(len(plan))]
    slab = torch.full((plan.total + 64,), 255, dtype=torch.uint8)
    store.read_into(plan, slab, offsets, threads=threads)
    for key, layout, at in zip(plan.keys, plan.layouts, offsets.tolist(), strict=True):
        assert torch.equal(layout.views(slab[at : at + layout.size])["x"], content(NUMBER[key]))


@settings(max_examples=12, deadline=None)
@given(st.sets(st.sampled_from([*NUMBER]), min_size=1, max_size=4))
def test_only_the_damaged_ones_of_a_run_are_damaged(tmp_path_factory: pytest.TempPathFactory, bad: set[Key]) -> None:
    folder: Path = tmp_path_factory.mktemp("damaged") / "cache"
    with DiskStore.open(folder, writable=True) as store:
        with store.writer() as writer:
            for number, origin in enumerate(ORIGINS):
                writer.add(origin, {"x": content(number)})
        for copy in places_of(store.locate([*bad])):
            with (store.shards_folder / copy.shard).open("r+b") as file:
                file.seek(copy.start + copy.layout.size // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 4]))
        plan = store.locate([*NUMBER])
        offsets = np.cumsum(plan.sizes) - plan.sizes
        slab = torch.zeros(plan.total, dtype=torch.uint8)
        with pytest.raises(CorruptEntryError) as caught:
            store.read_into(plan, slab, offsets)
        assert {*caught.value.keys} == bad
        for key, layout, at in zip(plan.keys, plan.layouts, offsets.tolist(), strict=True):
            right = torch.equal(layout.views(slab[at : at + layout.size])["x"], content(NUMBER[key]))
            assert right == (key not in bad)


def test_the_index_knows_the_runs(store: DiskStore) -> None:
    store.save_index()
    with DiskStore.open(store.folder, writable=False) as again:
        plans = [one.locate([*NUMBER]) for one in (store, again)]
    found = [jobs(plan, np.cumsum(plan.sizes) - plan.sizes) for plan in plans]
    checksums = [{one.checksum for one in some} for some in found]
    assert checksums[0] == checksums[1] != {None}
