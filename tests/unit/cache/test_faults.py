"""Real faults: whatever happens to a cache, the result is correct data or a clear error."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gracetune.cache.errors import CacheFullError, CorruptEntryError, ReadOnlyCacheError
from gracetune.cache.maintenance import ShardSize, compact, remove
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from unit.cache.processes import Child, make_read_only, mount_tmpfs, own_mounts
from unit.cache.samples import entry, is_entry, key, origin

SIDE = 24


def fill(folder: Path, numbers: range, flush: Flush) -> None:
    with DiskStore.open(folder, writable=True) as store, store.writer(flush) as writer:
        for number in numbers:
            writer.add(origin(number), entry(number, side=SIDE))


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "shards").glob("*.safetensors"))


def check_all(folder: Path, numbers: range) -> list[int]:
    """Check that every stored entry is correct. Returns the numbers of the stored entries."""
    with DiskStore.open(folder, writable=False) as store:
        assert store.damaged == ()
        found = [number for number in numbers if key(number) in store]
        assert all(is_entry(store.read(key(number)), number, side=SIDE) for number in found)
    return found


# -- kill -9


def killed_while_writing(folder: Path, first: int, draw: random.Random) -> int:
    """Kill a process while it writes. Returns the number of entries that it reported as flushed."""

    def work(report: Callable[[str], None]) -> None:
        with DiskStore.open(folder, writable=True) as store, store.writer(Flush(entries=1000)) as writer:
            report("0")
            for number in range(first, first + 1000):
                writer.add(origin(number), entry(number, side=SIDE))
                if (number - first) % 3 == 2:
                    writer.flush()
                    report(str(number - first + 1))

    child = Child(work)
    child.wait_for_word()
    time.sleep(draw.uniform(0, 0.05))
    child.kill()
    return int(child.lines[-1])


def storm(folder: Path, kills: int, seed: int) -> int:
    """Returns how many kills happened while a shard was being written."""
    draw = random.Random(seed)
    first, flushed, in_the_middle = 0, set[int](), 0
    for _ in range(kills):
        count = killed_while_writing(folder, first, draw)
        in_the_middle += any(path.suffix == ".tmp" for path in (folder / "shards").iterdir())
        flushed |= {*range(first, first + count)}
        found = {*check_all(folder, range(first + 1000))}
        assert flushed <= found
        assert found - flushed <= {*range(first + count, first + count + 3)}, "more than the one flush under way"
        flushed = found
        first = max(found, default=-1) + 1
    DiskStore.open(folder, writable=True).close()
    assert {path.suffix for path in (folder / "shards").iterdir()} <= {".safetensors"}, "left-overs are swept"
    return in_the_middle


def test_a_writer_killed_at_any_moment_loses_no_flush_and_leaves_nothing_half(tmp_path: Path) -> None:
    storm(tmp_path, kills=8, seed=1)


@pytest.mark.full
def test_a_storm_of_kills(tmp_path: Path) -> None:
    assert storm(tmp_path, kills=100, seed=2) > 10


@pytest.mark.parametrize("seed", range(4))
def test_a_process_killed_while_it_merges_or_removes_loses_nothing_else(tmp_path: Path, seed: int) -> None:
    fill(tmp_path, range(60), Flush(entries=2))

    def work(report: Callable[[str], None]) -> None:
        with DiskStore.open(tmp_path, writable=True) as store:
            report("go")
            compact(store, ShardSize(entries=16))
            remove(store, [key(number) for number in range(0, 60, 7)])

    child = Child(work)
    child.wait_for_word()
    time.sleep(random.Random(seed).uniform(0, 0.05))
    child.kill()
    found = check_all(tmp_path, range(60))
    assert {number for number in range(60) if number % 7} <= {*found}


def test_a_merge_killed_before_the_old_shards_went_leaves_copies_that_do_no_harm(tmp_path: Path) -> None:
    fill(tmp_path, range(8), Flush(entries=2))
    old = {path: path.read_bytes() for path in shards(tmp_path)}
    with DiskStore.open(tmp_path, writable=True) as store:
        assert compact(store).shards_after == 1
    for path, content in old.items():
        path.write_bytes(content)
    assert check_all(tmp_path, range(8)) == [*range(8)]
    with DiskStore.open(tmp_path, writable=True) as store:
        done = compact(store)
        assert (done.shards_after, done.copies_dropped) == (1, 8)
    assert check_all(tmp_path, range(8)) == [*range(8)]


def test_what_a_living_process_writes_is_not_swept(tmp_path: Path) -> None:
    fill(tmp_path, range(1), Flush())
    left = tmp_path / "shards" / f"gracetune-{'a' * 32}.tmp"
    left.write_bytes(b"of a process that was killed")
    reading, writing = os.pipe()

    def work(report: Callable[[str], None]) -> None:
        from gracetune.storage.atomic import unfinished

        with unfinished(tmp_path / "shards") as (_, path):
            report(path.name)
            os.close(writing)
            os.read(reading, 1)  # until the test is done

    child = Child(work)
    os.close(reading)
    child.wait_for_word()
    DiskStore.open(tmp_path, writable=True).close()
    assert (tmp_path / "shards" / child.lines[0]).exists()
    assert not left.exists()
    os.close(writing)
    child.join()


# -- several processes


def test_two_processes_build_the_same_cache(tmp_path: Path) -> None:
    def build(step: int) -> Callable[[Callable[[str], None]], None]:
        def work(report: Callable[[str], None]) -> None:
            with DiskStore.open(tmp_path / "cache", writable=True) as store, store.writer(Flush(entries=5)) as writer:
                for number in range(60)[::step]:
                    writer.add(origin(number), entry(number, side=SIDE))

        return work

    children = [Child(build(1)), Child(build(-1)), Child(build(1))]
    for child in children:
        child.join()
    assert check_all(tmp_path / "cache", range(60)) == [*range(60)]
    with DiskStore.open(tmp_path / "cache", writable=True) as store:
        assert compact(store).shards_after == 1
        assert len(store.catalogue) == 60
    assert check_all(tmp_path / "cache", range(60)) == [*range(60)]


def test_a_reader_goes_on_while_others_write_and_merge(tmp_path: Path) -> None:
    fill(tmp_path, range(40), Flush(entries=2))

    def work(report: Callable[[str], None]) -> None:
        with DiskStore.open(tmp_path, writable=True) as store:
            for turn in range(8):
                with store.writer(Flush(entries=3)) as writer:
                    for number in range(40 + 9 * turn, 49 + 9 * turn):
                        writer.add(origin(number), entry(number, side=SIDE))
                compact(store, ShardSize(entries=30 + turn))

    with DiskStore.open(tmp_path, writable=False) as store:
        child = Child(work)
        rounds = 0
        plan = store.locate([key(number) for number in range(40)])
        offsets = np.concatenate([[0], np.cumsum(plan.sizes)[:-1]]).astype(np.int64)
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None or rounds == 0:
            assert all(is_entry(store.read(key(number)), number, side=SIDE) for number in range(40))
            slab = torch.zeros(plan.total, dtype=torch.uint8)
            store.read_into(plan, slab, offsets)  # a plan made before the files it names were merged away
            views = [
                layout.views(slab[at : at + layout.size]) for layout, at in zip(plan.layouts, offsets, strict=True)
            ]
            numbers = [int(view["time_ids"][0]) for view in views]
            assert sorted(numbers) == [*range(40)]
            assert all(is_entry(view, number, side=SIDE) for view, number in zip(views, numbers, strict=True))
            rounds += 1
        child.join()
    assert check_all(tmp_path, range(112)) == [*range(112)]


def test_a_reader_finds_entries_that_moved_before_it_opened_their_files(tmp_path: Path) -> None:
    fill(tmp_path, range(12), Flush(entries=2))
    with DiskStore.open(tmp_path, writable=False) as one, DiskStore.open(tmp_path, writable=False) as other:
        plan = other.locate([key(number) for number in range(12)])
        with DiskStore.open(tmp_path, writable=True) as store:
            assert compact(store).shards_after == 1
        assert all(is_entry(one.read(key(number)), number, side=SIDE) for number in range(12))
        slab = torch.zeros(plan.total, dtype=torch.uint8)
        size = int(plan.sizes[0])
        other.read_into(plan, slab, np.arange(12, dtype=np.int64) * size)
        views = {name: plan.layouts[at].views(slab[at * size : (at + 1) * size]) for at, name in enumerate(plan.keys)}
        assert all(is_entry(views[key(number)], number, side=SIDE) for number in range(12))


# -- damage


def spoiled(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x20
    path.write_bytes(raw)


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_flipped_byte_anywhere_in_a_header_takes_the_shard_out(tmp_path: Path) -> None:
    fill(tmp_path, range(2), Flush())
    (path,) = shards(tmp_path)
    whole, end = path.read_bytes(), header_end(path)
    for at in {*range(120), *range(120, end, 97), end - 1}:
        spoiled(path, at)
        with DiskStore.open(tmp_path, writable=False) as store:
            assert store.keys() == [], at
            assert [shard.name for shard in store.damaged] == [path.name]
            assert store.damaged[0].reason
        path.write_bytes(whole)
    assert check_all(tmp_path, range(2)) == [0, 1]


def test_a_flipped_byte_of_the_data_takes_out_its_entry_alone(tmp_path: Path) -> None:
    fill(tmp_path, range(3), Flush())
    (path,) = shards(tmp_path)
    whole, end = path.read_bytes(), header_end(path)
    size = (len(whole) - end) // 3
    for place in (0, size // 2, size - 1):  # the last is padding: part of no tensor, and no longer what was written
        spoiled(path, end + size + place)
        with DiskStore.open(tmp_path, writable=False) as store:
            assert [is_entry(store.read(key(number)), number, side=SIDE) for number in (0, 2)] == [True, True]
            with pytest.raises(CorruptEntryError, match=r"do not match their checksum[\s\S]*cache build") as caught:
                store.read(key(1))
            assert caught.value.keys == (key(1),)
            assert store.find([key(0), key(1)]).missing == (key(1),), "it counts as missing from here on"
        path.write_bytes(whole)


def test_a_slab_gets_everything_but_the_damaged_entries(tmp_path: Path) -> None:
    fill(tmp_path, range(6), Flush())
    (path,) = shards(tmp_path)
    size = (len(path.read_bytes()) - header_end(path)) // 6
    spoiled(path, header_end(path) + 2 * size + 5)
    spoiled(path, header_end(path) + 4 * size + 5)
    with DiskStore.open(tmp_path, writable=False) as store:
        plan = store.locate([key(number) for number in range(6)])
        offsets = np.arange(6, dtype=np.int64) * size
        slab = torch.empty(plan.total, dtype=torch.uint8)
        with pytest.raises(CorruptEntryError) as caught:
            store.read_into(plan, slab, offsets)
        assert {*caught.value.keys} == {key(2), key(4)}
        for at, one in enumerate(plan.keys):
            if one not in caught.value.keys:
                assert is_entry(plan.layouts[at].views(slab[at * size : (at + 1) * size]), at, side=SIDE)


def test_a_damaged_entry_is_replaced_by_a_new_copy(tmp_path: Path) -> None:
    fill(tmp_path, range(3), Flush())
    (path,) = shards(tmp_path)
    spoiled(path, header_end(path) + 5)
    with DiskStore.open(tmp_path, writable=True) as store:
        with pytest.raises(CorruptEntryError):
            store.read(key(0))
        with store.writer() as writer:
            writer.add(origin(0), entry(0, side=SIDE))
        assert writer.added == 1
    assert check_all(tmp_path, range(3)) == [0, 1, 2], "another process finds the good copy"
    with DiskStore.open(tmp_path, writable=True) as store:
        assert compact(store).shards_after == 1
        assert len(store.catalogue) == 3
    assert check_all(tmp_path, range(3)) == [0, 1, 2]


@pytest.mark.parametrize("keep", [0, 7, 8, 300, -1, -5000])
def test_a_truncated_shard_is_taken_out_and_named(tmp_path: Path, keep: int) -> None:
    fill(tmp_path, range(4), Flush(entries=2))
    path = shards(tmp_path)[0]
    with DiskStore.open(tmp_path, writable=True) as store:
        store.save_index()
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with DiskStore.open(tmp_path, writable=False) as store:
        assert [shard.name for shard in store.damaged] == [path.name]
        current = [number for number in range(4) if key(number) in store]
        assert len(current) == 2
        assert all(is_entry(store.read(key(number)), number, side=SIDE) for number in current)
    fill(tmp_path, range(4), Flush())
    with DiskStore.open(tmp_path, writable=False) as store:
        assert all(is_entry(store.read(key(number)), number, side=SIDE) for number in range(4))


def test_a_shard_truncated_under_an_open_store_is_an_error_and_no_crash(tmp_path: Path) -> None:
    fill(tmp_path, range(4), Flush())
    (path,) = shards(tmp_path)
    with DiskStore.open(tmp_path, writable=False) as store:
        assert is_entry(store.read(key(0)), 0, side=SIDE)
        os.truncate(path, header_end(path) + 100)
        with pytest.raises(CorruptEntryError):
            store.read(key(3))


@pytest.mark.parametrize("region", ["length", "header", "data", "cut", "empty"])
def test_a_damaged_index_is_made_anew_from_the_shards(tmp_path: Path, region: str) -> None:
    fill(tmp_path, range(40), Flush(entries=2))
    index = tmp_path / "index.safetensors"
    whole = index.read_bytes()
    if region in ("cut", "empty"):
        os.truncate(index, 0 if region == "empty" else len(whole) - 3)
    else:
        spoiled(index, {"length": 1, "header": 200, "data": header_end(index) + 9}[region])
    assert check_all(tmp_path, range(40)) == [*range(40)]
    DiskStore.open(tmp_path, writable=True).close()
    assert len(index.read_bytes()) == len(whole), "and written"


def test_an_old_index_does_not_hide_new_shards_nor_show_removed_ones(tmp_path: Path) -> None:
    fill(tmp_path, range(40), Flush(entries=2))
    index = (tmp_path / "index.safetensors").read_bytes()
    with DiskStore.open(tmp_path, writable=True) as store:
        remove(store, [key(number) for number in range(10)])
    fill(tmp_path, range(40, 44), Flush())
    (tmp_path / "index.safetensors").write_bytes(index)
    assert check_all(tmp_path, range(44)) == [*range(10, 44)]


# -- the machine


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_half(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        folder = tmp_path / "small"
        mount_tmpfs(folder, 1 << 20)
        store = DiskStore.open(folder, writable=True)
        writer = store.writer(Flush(entries=20))

        def fill_up() -> None:
            for number in range(1000):
                writer.add(origin(number), entry(number, side=SIDE))

        with pytest.raises(CacheFullError) as caught:
            fill_up()
        problem = caught.value.problem
        assert "No space left" in problem.found
        assert "KiB" in problem.expected
        assert f"df -h {folder}" in problem.hint
        flushed = len(store.catalogue)
        assert flushed >= 20
        assert flushed % 20 == 0
        assert [path for path in (folder / "shards").iterdir() if path.suffix == ".tmp"] == []
        assert check_all(folder, range(1000)) == [*range(flushed)]
        with pytest.raises(CacheFullError, match=r"found .* free\n *expected .* free"):
            store.check_room(1 << 21)
        # Room is made: what waited is written, and the work goes on where it stopped.
        done = remove(store, [key(number) for number in range(20)])
        assert done.entries == 20
        assert writer.flush() == 20
        assert check_all(folder, range(1000)) == [*range(20, flushed + 20)]
        store.close()

    Child(work).join()


def test_merging_on_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        folder = tmp_path / "small"
        mount_tmpfs(folder, 1 << 20)
        fill(folder, range(60), Flush(entries=3))
        (folder / "index.safetensors").unlink()
        ballast = os.statvfs(folder)
        (folder / "ballast").write_bytes(bytes((ballast.f_bavail - 1) * ballast.f_frsize))
        with DiskStore.open(folder, writable=True) as store:  # no room for the index either: the shards do without
            assert not (folder / "index.safetensors").exists()
            with pytest.raises(CacheFullError):
                compact(store)
        assert check_all(folder, range(60)) == [*range(60)]

    Child(work).join()


def test_a_read_only_folder_is_read_and_rejects_to_be_written(tmp_path: Path) -> None:
    fill(tmp_path / "cache", range(5), Flush())

    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        make_read_only(tmp_path / "cache")
        assert check_all(tmp_path / "cache", range(5)) == [*range(5)]
        with pytest.raises(ReadOnlyCacheError, match=r"cache\.cache_dir"):
            DiskStore.open(tmp_path / "cache", writable=True)
        with pytest.raises(ReadOnlyCacheError, match="Read-only file system"):
            DiskStore.open(tmp_path / "cache" / "new", writable=True)

    Child(work).join()


def test_a_folder_of_another_user_is_read_and_rejects_to_be_written(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    folder = tmp_path / "cache"
    fill(folder, range(5), Flush())
    for path in (*folder.parents, folder):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)

    def work(report: Callable[[str], None]) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        assert check_all(folder, range(5)) == [*range(5)]
        with pytest.raises(ReadOnlyCacheError, match="without write permission"):
            DiskStore.open(folder, writable=True)

    Child(work).join()


def test_a_folder_that_became_read_only_while_it_was_open(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        folder = tmp_path / "small"
        mount_tmpfs(folder, 1 << 20)
        store = DiskStore.open(folder, writable=True)
        writer = store.writer()
        writer.add(origin(0), entry(0, side=SIDE))
        make_read_only(folder)
        reopened = DiskStore.open(folder, writable=False)
        assert reopened.keys() == []
        with pytest.raises(ReadOnlyCacheError, match="Read-only file system"):
            writer.flush()

    Child(work).join()


def test_the_clock_does_not_matter(tmp_path: Path) -> None:
    fill(tmp_path, range(40), Flush(entries=2))
    left = tmp_path / "shards" / f"gracetune-{'b' * 32}.tmp"
    left.write_bytes(b"left by a process that is no more")
    for number, path in enumerate([*shards(tmp_path), tmp_path / "index.safetensors", left]):
        moment = 0 if number % 2 else 4_000_000_000  # the years 1970 and 2096
        os.utime(path, (moment, moment))
    assert check_all(tmp_path, range(40)) == [*range(40)]
    fill(tmp_path, range(40, 44), Flush())
    assert check_all(tmp_path, range(44)) == [*range(44)]
    assert not left.exists()
