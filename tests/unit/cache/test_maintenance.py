from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gracetune.cache.errors import CacheBusyError, ReadOnlyCacheError
from gracetune.cache.maintenance import (
    ShardSize,
    compact,
    leave_out_damaged,
    remove,
    remove_damaged,
    remove_if_empty,
    sweep_removed,
)
from gracetune.cache.session import open_store
from gracetune.cache.shards import pack
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.storage.atomic import temporary_name
from gracetune.storage.locks import is_at, lock
from unit.cache.processes import Child
from unit.cache.sample_caches import places_of
from unit.cache.samples import entry, is_entry, key, origin


def filled(folder: Path, numbers: range, flush: Flush | None = None) -> DiskStore:
    store = DiskStore.open(folder, writable=True)
    with store.writer(flush) as writer:
        for number in numbers:
            writer.add(origin(number), entry(number))
    return store


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "shards").iterdir()}


def numbers_in(store: DiskStore, numbers: range) -> list[int]:
    found = [number for number in numbers if key(number) in store]
    assert all(is_entry(store.read(key(number)), number) for number in found)
    return found


def test_small_shards_are_merged(tmp_path: Path) -> None:
    with filled(tmp_path, range(50), Flush(entries=5)) as store:
        done = compact(store, ShardSize(entries=24))
        assert (done.shards_before, done.shards_after) == (10, 3)
        assert done.reason == "10 small shards were merged"
        assert numbers_in(store, range(50)) == [*range(50)]
        origins = {found.key: found.origin for _, found in store.stored()}
        assert origins == {key(number): origin(number) for number in range(50)}
    with DiskStore.open(tmp_path, writable=False) as store:
        assert len(store.catalogue) == 50
        assert numbers_in(store, range(50)) == [*range(50)]


def test_large_shards_are_left_alone(tmp_path: Path) -> None:
    with filled(tmp_path, range(40), Flush(entries=20)) as store:
        before = names(tmp_path)
        assert compact(store, ShardSize(entries=80)).reason == "there are no small shards to merge"
        assert names(tmp_path) == before
    with filled(tmp_path, range(40, 44), Flush(entries=2)) as store:
        done = compact(store, ShardSize(entries=80))
        assert (done.shards_before, done.shards_after) == (4, 3)
        assert before < names(tmp_path)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_copy_is_dropped_only_where_the_one_that_stays_is_good(tmp_path: Path, damaged: bool) -> None:
    with filled(tmp_path, range(20)) as store:
        (large,) = places_of(store.locate([key(3)]))
        for number in (3, 50):
            store.add_shard([pack(key(number), origin(number), entry(number))])
        if damaged:
            with (store.shards_folder / large.shard).open("r+b") as file:
                file.seek(large.start)
                byte = file.read(1)[0]
                file.seek(large.start)
                file.write(bytes([byte ^ 1]))
        done = compact(store, ShardSize(entries=80))
        assert (done.shards_before, done.shards_after) == (3, 2)
        assert done.copies_dropped == (0 if damaged else 1)
        assert numbers_in(store, range(51)) == [*range(20), 50]


def test_only_one_process_merges_at_a_time(tmp_path: Path) -> None:
    filled(tmp_path, range(6), Flush(entries=2)).close()

    def work(report: Callable[[str], None]) -> None:
        import fcntl
        import os
        import time

        descriptor = os.open(tmp_path / "upkeep.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        report("held")
        time.sleep(60)

    child = Child(work)
    child.wait_for_word()
    with DiskStore.open(tmp_path, writable=True) as store:
        assert compact(store).reason.startswith("another process is merging shards")
        child.kill()
        assert compact(store).shards_after == 1, "the lock went with its process"


def test_only_the_entries_named_are_removed(tmp_path: Path) -> None:
    with filled(tmp_path, range(20), Flush(entries=4)) as store:
        done = remove(store, [key(number) for number in (0, 1, 2, 3, 5, 6, 99)])
        assert (done.entries, done.size) == (6, 6 * 576)
        assert numbers_in(store, range(20)) == [4, *range(7, 20)]
        assert store.created == {key(number) for number in (4, *range(7, 20))}
    with DiskStore.open(tmp_path, writable=False) as store:
        assert numbers_in(store, range(20)) == [4, *range(7, 20)]
        assert len(names(tmp_path)) == 4


def test_all_copies_of_an_entry_are_removed(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as one:
        other = DiskStore.open(tmp_path, writable=True)
        with one.writer() as first, other.writer() as second:
            for writer in (first, second):
                writer.add(origin(1), entry(1))
                writer.add(origin(2), entry(2))
        other.close()
        done = remove(one, [key(1)])
        assert (done.entries, done.size) == (1, 2 * 576)
        assert numbers_in(one, range(5)) == [2]


def test_a_run_removes_what_it_created_and_nothing_else(tmp_path: Path) -> None:
    filled(tmp_path, range(10)).close()
    with filled(tmp_path, range(5, 15)) as store:
        assert store.created == {key(number) for number in range(10, 15)}
        compact(store)  # which puts old and new into one file
        remove(store, store.created)
        assert store.created == frozenset()
        assert numbers_in(store, range(15)) == [*range(10)]


def test_nothing_is_removed_while_another_process_uses_the_cache(tmp_path: Path) -> None:
    filled(tmp_path, range(4)).close()

    def work(report: Callable[[str], None]) -> None:
        import time

        with DiskStore.open(tmp_path, writable=False):
            report("open")
            time.sleep(60)

    child = Child(work)
    child.wait_for_word()
    with DiskStore.open(tmp_path, writable=True) as store:
        with pytest.raises(CacheBusyError, match=r"another process uses this cache"):
            remove(store, [key(0)])
        assert numbers_in(store, range(4)) == [*range(4)]
        child.kill()
        assert remove(store, [key(0)]).entries == 1


def test_a_failed_attempt_to_remove_keeps_the_store_in_use(tmp_path: Path) -> None:
    one, two = filled(tmp_path, range(4)), DiskStore.open(tmp_path, writable=True)
    with one, two:
        for store in (one, two, one):
            with pytest.raises(CacheBusyError):
                remove(store, [key(0)])


def test_on_a_disk_without_locks_entries_are_added_and_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network mounts have no locks. Test machines have no such mount, so the kernel's error is simulated."""

    def no_locks(descriptor: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    left = tmp_path / "shards" / f"gracetune-{'c' * 32}.tmp"
    with filled(tmp_path, range(6), Flush(entries=2)) as store:
        left.write_bytes(b"perhaps of a living process")
        assert numbers_in(store, range(6)) == [*range(6)]
        with pytest.raises(CacheBusyError, match="a file system without locks"):
            remove(store, [key(0)])
        assert "no locks" in compact(store).reason
    DiskStore.open(tmp_path, writable=True).close()
    assert left.exists()


def test_damaged_shards_are_removed_on_request(tmp_path: Path) -> None:
    filled(tmp_path, range(4), Flush(entries=2)).close()
    mine = tmp_path / "shards" / "notes.safetensors"
    mine.write_bytes(b"mine")
    victim = next(path for path in (tmp_path / "shards").iterdir() if path != mine)
    victim.write_bytes(victim.read_bytes()[:-1])
    with DiskStore.open(tmp_path, writable=True) as store:
        assert [one.name for one in remove_damaged(store)] == [victim.name]
        assert store.damaged == ()
        assert len(numbers_in(store, range(4))) == 2
    assert mine.exists()
    assert not victim.exists()


def test_what_another_release_wrote_or_cannot_be_read_now_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gracetune.cache.shards.SHARD_FORMAT", "gracetune-cache-shard 2")
    filled(tmp_path, range(2)).close()
    monkeypatch.undo()
    (newer,) = (tmp_path / "shards").iterdir()
    folder = tmp_path / "shards" / f"{'a' * 32}.safetensors"
    folder.mkdir()  # reading it gives an OSError
    with DiskStore.open(tmp_path, writable=True) as store:
        assert {one.name for one in store.damaged} == {newer.name, folder.name}
        assert remove_damaged(store) == ()
    assert newer.exists()
    assert folder.exists()


class TestAHeaderDamagedSinceTheIndexWasWritten:
    """The index contains the shard, so its header is normally not read."""

    @pytest.fixture
    def victim(self, tmp_path: Path) -> Path:
        with filled(tmp_path, range(6), Flush(entries=2)) as store:
            store.save_index()
            victim = tmp_path / "shards" / places_of(store.locate([key(0)]))[0].shard
        raw = bytearray(victim.read_bytes())
        raw[300] ^= 1
        victim.write_bytes(raw)
        return victim

    def test_is_found_when_it_is_looked_for(self, tmp_path: Path, victim: Path) -> None:
        with DiskStore.open(tmp_path, writable=True) as store:
            assert store.damaged == ()
            assert leave_out_damaged(store) == 1
            assert [one.name for one in store.damaged] == [victim.name]
            assert numbers_in(store, range(6)) == [2, 3, 4, 5]
            assert leave_out_damaged(store) == 0

    def test_stops_neither_merging_nor_removing(self, tmp_path: Path, victim: Path) -> None:
        with DiskStore.open(tmp_path, writable=True) as store:
            assert remove(store, [key(0), key(2)]).entries == 1
            assert numbers_in(store, range(6)) == [3, 4, 5]
            assert victim.exists()
        with filled(tmp_path, range(6, 8)) as store:
            assert compact(store).shards_after == 1
            assert numbers_in(store, range(8)) == [3, 4, 5, 6, 7]

    def test_merging_alone_leaves_it(self, tmp_path: Path, victim: Path) -> None:
        with DiskStore.open(tmp_path, writable=True) as store:
            assert compact(store).shards_after == 1
            assert numbers_in(store, range(6)) == [2, 3, 4, 5]
        assert victim.exists()


@pytest.mark.parametrize("what", [compact, lambda store: remove(store, []), remove_damaged])
def test_a_store_opened_for_reading_keeps_everything(tmp_path: Path, what: Callable[[DiskStore], object]) -> None:
    filled(tmp_path, range(4), Flush(entries=2)).close()
    with DiskStore.open(tmp_path, writable=False) as store, pytest.raises(ReadOnlyCacheError):
        what(store)


class TestAnEmptyStore:
    def test_is_taken_away_whole(self, tmp_path: Path) -> None:
        folder = tmp_path / "0"
        with filled(folder, range(3)) as store:
            remove(store, [key(number) for number in range(3)])
            remove_if_empty(store)
        assert [*tmp_path.iterdir()] == []

    @pytest.mark.parametrize("what", ["mine.txt", "shards/mine.txt", f"shards/{'a' * 32}.safetensors"])
    def test_stays_with_anything_else_in_it(self, tmp_path: Path, what: str) -> None:
        with filled(tmp_path / "0", range(0)) as store:
            (tmp_path / "0" / what).write_text("mine")
            remove_if_empty(store)
        assert (tmp_path / "0" / what).read_text() == "mine"

    def test_stays_while_somebody_uses_it(self, tmp_path: Path) -> None:
        with (
            filled(tmp_path, range(0)) as store,
            DiskStore.open(tmp_path, writable=False),
            pytest.raises(CacheBusyError),
        ):
            remove_if_empty(store)

    @pytest.mark.parametrize("somebody_was_quicker", [False, True])
    def test_who_waited_for_it_opens_the_new_one(self, tmp_path: Path, somebody_was_quicker: bool) -> None:
        """The lock was requested before the folder was renamed and granted afterwards."""
        folder = tmp_path / "0"

        def work(report: Callable[[str], None]) -> None:
            store.close()  # the fork's copy: it would hold the lock for ever
            report("asks")
            with open_store(folder) as mine, mine.writer() as writer:
                writer.add(origin(7), entry(7))
                assert mine.users_lock is not None
                report("locked" if is_at(mine.users_lock, folder / "users.lock") else "locked something else")

        with filled(folder, range(0)) as store:
            assert store.users_lock is not None
            lock(store.users_lock, exclusive=True)
            child = Child(work)
            assert child.wait_for_word()
            while f" {child.pid} " not in Path("/proc/locks").read_text():  # it waits
                time.sleep(0.01)
            folder.rename(tmp_path / "gone")
            if somebody_was_quicker:
                filled(folder, range(1)).close()
        assert child.join() == ["asks", "locked"]
        with DiskStore.open(folder, writable=False) as found:
            assert numbers_in(found, range(10)) == ([0, 7] if somebody_was_quicker else [7])

    def test_half_taken_away_by_a_killed_process_it_goes_the_next_time(self, tmp_path: Path) -> None:
        filled(tmp_path / "0", range(0)).close()
        (tmp_path / "0").rename(tmp_path / temporary_name())
        kept = tmp_path / temporary_name()
        kept.mkdir()
        (kept / "mine.txt").write_text("mine")
        sweep_removed(tmp_path)
        sweep_removed(tmp_path / "nowhere")
        assert [path.name for path in tmp_path.iterdir()] == [kept.name]
