from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from gracetune.cache.errors import CacheError, CacheFullError, ForeignFolderError, MissingEntryError, ReadOnlyCacheError
from gracetune.cache.keys import EntryOrigin
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from unit.cache.samples import entry, is_entry, key, origin


def filled(folder: Path, numbers: range, flush: Flush | None = None) -> None:
    with DiskStore.open(folder, writable=True) as store, store.writer(flush) as writer:
        for number in numbers:
            assert writer.add(origin(number), entry(number)) == key(number)


def slab_of(store: DiskStore, numbers: range, threads: int) -> dict[str, dict[str, torch.Tensor]]:
    plan = store.locate([key(number) for number in numbers])
    offsets = np.concatenate([[0], np.cumsum(plan.sizes)[:-1]]).astype(np.int64)
    slab = torch.empty(plan.total, dtype=torch.uint8)
    store.read_into(plan, slab, offsets, threads=threads)
    rows = zip(plan.keys, plan.layouts, offsets.tolist(), strict=True)
    return {one: layout.views(slab[at : at + layout.size]) for one, layout, at in rows}


def test_a_store_that_cannot_be_locked_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "cache", range(1))

    def broken(descriptor: int, mode: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = [*Path("/proc/self/fd").iterdir()]
    monkeypatch.setattr("fcntl.flock", broken)
    for writable in (False, True):
        with pytest.raises(CacheError):
            DiskStore.open(tmp_path / "cache", writable=writable)
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path / "cache", range(10))
    with DiskStore.open(tmp_path / "cache", writable=False) as store:
        assert all(is_entry(store.read(key(number)), number) for number in range(10))
        found = store.find([key(3), key(77), key(9), key(78)])
        assert found.present == (key(3), key(9))
        assert found.missing == (key(77), key(78))
        assert key(3) in store
        assert key(77) not in store
        assert store.keys() == sorted(key(number) for number in range(10))


@pytest.mark.parametrize("threads", [1, 4])
def test_many_entries_are_read_into_one_slab(tmp_path: Path, threads: int) -> None:
    filled(tmp_path, range(200), Flush(entries=16))
    with DiskStore.open(tmp_path, writable=False) as store:
        found = slab_of(store, range(200), threads)
    assert all(is_entry(found[key(number)], number) for number in range(200))


def test_entries_may_be_read_to_places_in_any_order(tmp_path: Path) -> None:
    filled(tmp_path, range(8))
    with DiskStore.open(tmp_path, writable=False) as store:
        plan = store.locate([key(number) for number in range(8)])
        assert len({*plan.sizes.tolist()}) == 1
        offsets = np.arange(8)[::-1].astype(np.int64) * plan.sizes[0]
        slab = torch.empty(plan.total, dtype=torch.uint8)
        store.read_into(plan, slab, offsets)
        numbers = {key(number): number for number in range(8)}
        for one, layout, at in zip(plan.keys, plan.layouts, offsets.tolist(), strict=True):
            assert is_entry(layout.views(slab[at : at + layout.size]), numbers[one])


def test_a_slab_of_the_wrong_kind_is_a_mistake(tmp_path: Path) -> None:
    filled(tmp_path, range(1))
    with DiskStore.open(tmp_path, writable=False) as store:
        plan = store.locate([key(0)])
        with pytest.raises(ValueError, match=r"uint8 tensor, found torch\.float32"):
            store.read_into(plan, torch.empty(plan.total, dtype=torch.float32), np.zeros(1, np.int64))


def test_offsets_outside_of_the_slab_are_a_mistake(tmp_path: Path) -> None:
    filled(tmp_path, range(2))
    with DiskStore.open(tmp_path, writable=False) as store:
        plan = store.locate([key(0), key(1)])
        slab = torch.empty(plan.total, dtype=torch.uint8)
        for offsets in ([0, 577], [-64, 576], [0]):
            with pytest.raises(ValueError, match="do not place 2 entries in 1152 bytes"):
                store.read_into(plan, slab, np.array(offsets, np.int64))


def cached_pages(path: Path) -> int:
    """The number of the file's pages in the kernel's page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        if libc.mincore(address, ctypes.c_size_t(size), pages) != 0:
            pytest.skip("mincore is not permitted here")
        return sum(page & 1 for page in pages)


def test_the_page_cache_can_be_let_go_of(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store, store.writer() as writer:
        for number in range(4):
            writer.add(origin(number), {"latents": torch.zeros(1 << 18)})
    (path,) = (tmp_path / "shards").iterdir()
    with DiskStore.open(tmp_path, writable=False) as store:
        plan = store.locate([key(number) for number in range(4)])
        slab = torch.empty(plan.total, dtype=torch.uint8)
        offsets = np.concatenate([[0], np.cumsum(plan.sizes)[:-1]])
        store.read_into(plan, slab, offsets)
        held = cached_pages(path)
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if held < 1000 or cached_pages(path) > held / 4:
            pytest.skip("this file system does not keep pages, or does not let go of them")
        store.read_into(plan, slab, offsets)
        assert cached_pages(path) == held
        store.read_into(plan, slab, offsets, keep_page_cache=False)
        assert cached_pages(path) < held / 4


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    filled(tmp_path, range(2))
    with DiskStore.open(tmp_path, writable=False) as store:
        with pytest.raises(MissingEntryError, match=r"cache build") as caught:
            store.read(key(5))
        assert caught.value.keys == (key(5),)
        with pytest.raises(MissingEntryError) as caught:
            store.locate([key(0), key(5), key(6)])
        assert caught.value.keys == (key(5), key(6))


def test_layouts_tell_names_types_shapes_and_places(tmp_path: Path) -> None:
    filled(tmp_path, range(2))
    with DiskStore.open(tmp_path, writable=False) as store:
        layout, other = store.locate([key(0), key(1)]).layouts
        assert layout is other
    facts = [(one.name, one.dtype, one.shape, one.offset, one.size) for one in layout.tensors]
    assert facts == [
        ("time_ids", "F32", (6,), 0, 24),
        ("latents", "BF16", (4, 8, 8), 24, 512),
        ("flag", "BOOL", (3,), 536, 3),
    ]
    assert layout.size == 576


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip
some_tensor = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4))
some_entry = st.dictionaries(st.text("abc_./", min_size=1, max_size=4), some_tensor, min_size=1, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(some_entry, min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_every_kind_of_tensor_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[dict[str, tuple[torch.dtype, list[int]]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).reshape(shape)

    entries = [{name: tensor(*kind) for name, kind in one.items()} for one in kinds]
    folder = tmp_path_factory.mktemp("cache")
    with DiskStore.open(folder, writable=True) as store:
        with store.writer() as writer:
            keys = [writer.add(EntryOrigin("latent", str(at), ()), one) for at, one in enumerate(entries)]
        for one, expected in zip(keys, entries, strict=True):
            found = store.read(one)
            assert found.keys() == expected.keys()
            for name, stored in found.items():
                assert stored.dtype == expected[name].dtype
                assert stored.shape == expected[name].shape
                assert stored.data_ptr() % stored.element_size() == 0
                same = stored.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
                assert torch.equal(*same)


def test_views_and_strides_are_stored_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    with DiskStore.open(tmp_path, writable=True) as store:
        with store.writer() as writer:
            writer.add(origin(0), {"latents": base.t()[1:4]})
            with torch.no_grad():
                base.zero_()  # the caller may reuse its tensors at once
        assert torch.equal(store.read(key(0))["latents"], torch.arange(24.0).reshape(4, 6).t()[1:4])


def test_entries_without_tensors_and_of_unknown_kinds_are_mistakes(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store, store.writer() as writer:
        with pytest.raises(ValueError, match="without tensors"):
            writer.add(origin(0), {})
        with pytest.raises(ValueError, match="complex128"):
            writer.add(origin(0), {"latents": torch.zeros(2, dtype=torch.complex128)})
        assert writer.added == 0


def test_a_shard_is_a_safetensors_file_anyone_can_read(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    (shard,) = (tmp_path / "shards").iterdir()
    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
        assert metadata["format"] == "gracetune-cache-shard 1"
        assert [row[0] for row in json.loads(metadata["entries"])] == [key(number) for number in range(3)]
        for number in range(3):
            found = {name: file.get_tensor(f"{key(number)}/{name}") for name in entry(number)}
            assert is_entry(found, number)


def test_the_index_is_a_safetensors_file_too(tmp_path: Path) -> None:
    filled(tmp_path, range(40), Flush(entries=2))
    with safe_open(tmp_path / "index.safetensors", "np") as file:
        assert len(file.get_tensor("high")) == 40
        assert np.all(np.diff(file.get_tensor("high").astype(object)) >= 0)


# -- writing


def test_a_writer_flushes_by_number_by_size_and_by_time(tmp_path: Path) -> None:
    def shards(flush: Flush) -> int:
        folder = tmp_path / f"{flush.entries}-{flush.size}-{flush.seconds}"
        filled(folder, range(12), flush)
        return len([*(folder / "shards").iterdir()])

    assert shards(Flush()) == 1
    assert shards(Flush(entries=4)) == 3
    assert shards(Flush(size=576 * 6)) == 2
    assert shards(Flush(seconds=0.0)) == 12


def test_flushed_entries_are_there_for_others_at_once(tmp_path: Path) -> None:
    with (
        DiskStore.open(tmp_path, writable=True) as store,
        DiskStore.open(tmp_path, writable=False) as other,
        store.writer() as writer,
    ):
        writer.add(origin(1), entry(1))
        assert other.refresh() == 0
        assert writer.flush() == 1
        assert key(1) not in other
        assert other.refresh() == 1
        assert is_entry(other.read(key(1)), 1)
        assert writer.flush() == 0


def test_reading_finds_what_others_added_meanwhile(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store, DiskStore.open(tmp_path, writable=False) as other:
        with store.writer() as writer:
            writer.add(origin(1), entry(1))
        assert is_entry(other.read(key(1)), 1)


def test_an_entry_is_written_once(tmp_path: Path) -> None:
    filled(tmp_path, range(4))
    with DiskStore.open(tmp_path, writable=True) as store:
        with store.writer() as writer:
            for number in (*range(6), *range(6)):
                writer.add(origin(number), entry(number))
        assert writer.added == 2
        assert store.created == {key(4), key(5)}
        assert len(store.catalogue) == 6


def test_two_writers_may_write_the_same_entry(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as one, DiskStore.open(tmp_path, writable=True) as two:
        with one.writer() as first, two.writer() as second:
            first.add(origin(1), entry(1))
            second.add(origin(1), entry(1))
        one.refresh()
        assert one.keys() == [key(1)]
        assert is_entry(one.read(key(1)), 1)


def test_threads_share_a_writer_and_a_store(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store:
        with store.writer(Flush(entries=7)) as writer:

            def work(first: int) -> None:
                for number in range(first, 120, 4):
                    writer.add(origin(number), entry(number))
                    assert first < 2 or is_entry(store.read(key(0)), 0)

            writer.add(origin(0), entry(0))
            writer.flush()
            threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert writer.added == 120
        assert all(is_entry(store.read(key(number)), number) for number in range(120))


def test_work_done_before_an_error_is_kept(tmp_path: Path) -> None:
    def fail(store: DiskStore) -> None:
        with store.writer() as writer:
            writer.add(origin(1), entry(1))
            raise RuntimeError("the encoder ran out of memory")

    with DiskStore.open(tmp_path, writable=True) as store:
        with pytest.raises(RuntimeError, match="the encoder"):
            fail(store)
        assert is_entry(store.read(key(1)), 1)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    filled(tmp_path, range(150), Flush(entries=1))
    before = open_files()
    with DiskStore.open(tmp_path, writable=False) as store:
        for _ in range(2):
            assert all(is_entry(store.read(key(number)), number) for number in range(150))
        assert open_files() <= before + 66
    assert open_files() == before


def test_room_is_checked_before_a_pass(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, writable=True) as store:
        store.check_room(1)
        with pytest.raises(CacheFullError, match=r"expected +8192 TiB free[\s\S]*df -h"):
            store.check_room(1 << 53)


# -- folders


def test_a_store_opened_for_reading_does_not_write(tmp_path: Path) -> None:
    filled(tmp_path, range(1))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with DiskStore.open(tmp_path, writable=False) as store, pytest.raises(ReadOnlyCacheError, match="for reading"):
        store.writer()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_folder_with_other_files_is_rejected_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"picture")
    with pytest.raises(ForeignFolderError, match=r"holiday\.jpg[\s\S]*nothing was changed"):
        DiskStore.open(tmp_path, writable=True)
    with pytest.raises(ForeignFolderError, match="not a gracetune cache"):
        DiskStore.open(tmp_path, writable=False)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_cache_of_a_newer_release_is_rejected(tmp_path: Path) -> None:
    filled(tmp_path, range(1))
    (tmp_path / "gracetune-cache.json").write_text('{"format": "gracetune-cache", "version": 2}')
    for writable in (True, False):
        with pytest.raises(ForeignFolderError, match=r"format 2, written by a newer gracetune"):
            DiskStore.open(tmp_path, writable=writable)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other", "version": 1}', '{"format": "gracetune-cache"}'])
def test_a_format_file_that_is_none_is_rejected(tmp_path: Path, text: str) -> None:
    filled(tmp_path, range(1))
    (tmp_path / "gracetune-cache.json").write_text(text)
    with pytest.raises(ForeignFolderError, match="format"):
        DiskStore.open(tmp_path, writable=True)


def test_no_folder_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ForeignFolderError, match=r"no such folder[\s\S]*cache build"):
        DiskStore.open(tmp_path / "none", writable=False)
    assert not (tmp_path / "none").exists()


def test_a_file_in_the_cache_that_is_not_ours_stays(tmp_path: Path) -> None:
    filled(tmp_path, range(1))
    others = [tmp_path / "notes.txt", tmp_path / "shards" / "mine.safetensors", tmp_path / "shards" / "x.tmp"]
    for path in others:
        path.write_bytes(b"mine")
    filled(tmp_path, range(1, 3))
    assert all(path.read_bytes() == b"mine" for path in others)
    with DiskStore.open(tmp_path, writable=False) as store:
        assert store.damaged == ()


def test_an_empty_folder_with_a_left_over_of_ours_becomes_a_cache(tmp_path: Path) -> None:
    """The leftover comes from a process that was killed while creating the cache."""
    left = tmp_path / f"gracetune-{'0' * 32}.tmp"
    left.write_bytes(b"{")
    filled(tmp_path, range(1))
    assert not left.exists()
