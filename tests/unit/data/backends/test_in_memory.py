from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gracetune.data.backends.errors import MemoryLimitError, StagingError
from gracetune.data.backends.handle import StagedHandle, from_json, to_json
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import attach_backend
from gracetune.data.errors import MissingFileError, OutsideRootError, UnreadableMediaError
from gracetune.testing.slow_backend import SlowBackend
from unit.data.backends.helpers import MIB, contents, fill, held, staged

FILES = {"a.jpg": b"A" * 5000, "a.txt": b"a cat", "b/c.png": b"C" * 100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "data", FILES)


def test_the_source_is_not_asked_again(folder: Path) -> None:
    source = SlowBackend(LocalBackend(folder))
    with staged(source) as backend:
        asked = source.requests
        source.latency_seconds = 60.0  # the disk goes away
        started = time.perf_counter()
        assert contents(backend) == FILES
        assert [backend.stat(path).size for path in backend.list()] == [5000, 5, 100]
        assert backend.exists("a.txt")
        with backend.open("a.jpg") as stream:
            assert stream.read() == FILES["a.jpg"]
        assert time.perf_counter() - started < 5
        assert source.requests == asked


class TestChanges:
    def test_writes_go_through_to_disk_and_are_seen(self, folder: Path) -> None:
        with staged(folder) as backend:
            before = backend.read("a.txt")
            backend.write("a.txt", b"a dog")
            backend.write("new/d.txt", b"D")
            assert (folder / "a.txt").read_bytes() == b"a dog" == backend.read("a.txt")
            assert before == b"a cat"  # who holds the old bytes keeps them
            assert backend.list() == ("a.jpg", "a.txt", "b/c.png", "new/d.txt")
            assert backend.stat("new/d.txt") == LocalBackend(folder).stat("new/d.txt")
            assert backend.digest("a.txt") is None
            with backend.open("a.txt") as stream:
                assert stream.read() == b"a dog"

    def test_files_of_other_kinds_can_be_written_too(self, folder: Path) -> None:
        with staged(folder) as backend:
            backend.write("state.bin", b"S")
            assert backend.read("state.bin") == b"S"
            assert "state.bin" in backend.list()
            backend.refresh()
            assert backend.read("state.bin") == b"S"

    def test_deletions_go_through_to_disk_and_are_seen(self, folder: Path) -> None:
        with staged(folder) as backend:
            backend.delete("a.txt")
            assert not (folder / "a.txt").exists()
            assert not backend.exists("a.txt")
            for call in (backend.read, backend.stat, backend.open, backend.delete):
                with pytest.raises(MissingFileError):
                    call("a.txt")
            backend.write("a.txt", b"again")
            assert backend.read("a.txt") == b"again"

    def test_a_staged_file_that_somebody_deleted_can_still_be_deleted(self, folder: Path) -> None:
        with staged(folder) as backend:
            (folder / "a.txt").unlink()
            assert backend.read("a.txt") == b"a cat"
            backend.delete("a.txt")
            assert not backend.exists("a.txt")

    def test_a_written_file_that_somebody_deleted_is_gone(self, folder: Path) -> None:
        with staged(folder) as backend:
            backend.write("a.txt", b"a dog")
            (folder / "a.txt").unlink()
            assert backend.list() == ("a.jpg", "b/c.png")
            assert not backend.exists("a.txt")

    def test_what_was_not_staged_is_not_there(self, folder: Path) -> None:
        fill(folder, {"notes.psd": b"P"})
        with staged(folder) as backend, pytest.raises(MissingFileError, match="not among the staged files"):
            backend.read("notes.psd")

    @pytest.mark.parametrize("path", ["../a.jpg", "/etc/passwd", "b\\c.png", "a\0", ""])
    def test_no_way_out(self, folder: Path, path: str) -> None:
        with staged(folder) as backend:
            for call in (backend.read, backend.stat, backend.open, backend.exists, backend.delete):
                with pytest.raises(OutsideRootError):
                    call(path)
            with pytest.raises(OutsideRootError):
                backend.write(path, b"")


class TestRefresh:
    def test_stages_what_changed_and_only_that(self, folder: Path) -> None:
        fill(folder, {"large.png": os.urandom(3 * MIB)})
        with staged(folder, compression="lz4") as backend:
            (folder / "a.txt").write_bytes(b"edited")
            (folder / "b/c.png").unlink()
            fill(folder, {"d.png": b"D"})
            old = backend.read("a.txt")
            assert contents(backend)["a.txt"] == b"a cat"  # a snapshot until it is asked to look
            seen = backend.refresh()
            assert (seen.added, seen.changed, seen.removed) == (("d.png",), ("a.txt",), ("b/c.png",))
            assert seen.report is not None
            assert seen.report.files == 2
            assert backend.list() == ("a.jpg", "a.txt", "d.png", "large.png")
            assert backend.read("a.txt") == b"edited"
            assert not backend.exists("b/c.png")
            assert old == b"a cat"

    def test_does_nothing_where_nothing_changed(self, folder: Path) -> None:
        with staged(folder) as backend:
            seen = backend.refresh()
            assert not seen
            assert seen.report is None
            assert len(backend.descriptors()) == 1

    def test_a_change_of_time_alone_counts(self, folder: Path) -> None:
        with staged(folder) as backend:
            os.utime(folder / "a.txt", ns=(5, 5))
            assert backend.refresh().changed == ("a.txt",)
            assert backend.stat("a.txt").modified_ns == 5

    def test_takes_written_files_into_memory(self, folder: Path) -> None:
        source = SlowBackend(LocalBackend(folder))
        with staged(source) as backend:
            backend.write("a.txt", b"a dog")
            backend.delete("b/c.png")
            assert backend.refresh().changed == ("a.txt",)
            asked = source.requests
            assert (bytes(backend.read("a.txt")), backend.exists("b/c.png")) == (b"a dog", False)
            assert backend.digest("a.txt") is not None
            assert source.requests == asked

    def test_a_write_during_a_refresh_is_not_lost(self, folder: Path) -> None:
        class WritesWhileListed(LocalBackend):
            writer: InMemoryBackend | None = None

            def stat(self, path: str):  # type: ignore[no-untyped-def]
                found = super().stat(path)
                if self.writer is not None and path == "a.txt":
                    writer, self.writer = self.writer, None
                    writer.write("a.txt", b"at the last moment")
                return found

        source = WritesWhileListed(folder)
        with staged(source) as backend:
            (folder / "a.txt").write_bytes(b"edited")
            source.writer = backend
            backend.refresh()
            assert backend.read("a.txt") == b"at the last moment"
            backend.refresh()
            assert backend.read("a.txt") == b"at the last moment"

    def test_a_file_that_became_unreadable_is_not_served_stale(self, folder: Path) -> None:
        class Breaking(LocalBackend):
            broken = False

            def open(self, path: str):  # type: ignore[no-untyped-def]
                if self.broken:
                    raise OSError(5, "Input/output error")
                return super().open(path)

        source = Breaking(folder)
        with staged(source) as backend:
            (folder / "a.txt").write_bytes(b"edited")
            source.broken = True
            seen = backend.refresh()
            assert seen.report is not None
            assert [item.path for item in seen.report.unreadable] == ["a.txt"]
            with pytest.raises(UnreadableMediaError, match=r"^a\.txt: Input/output error"):
                backend.read("a.txt")
            source.broken = False  # neither its size nor its time says so
            assert backend.refresh().changed == ("a.txt",)
            assert backend.read("a.txt") == b"edited"
            assert not backend.refresh()

    def test_the_limit_holds_for_all_of_it(self, folder: Path) -> None:
        with staged(folder, limit=2 * MIB) as backend:
            fill(folder, {"large.png": os.urandom(2 * MIB)})
            before = held()
            with pytest.raises(MemoryLimitError):
                backend.refresh()
            assert held() == before
            assert contents(backend) == FILES

    def test_a_restart_sees_the_folder_as_it_is(self, folder: Path) -> None:
        staged(folder).close()
        (folder / "a.txt").write_bytes(b"edited")
        with staged(folder) as backend:
            assert backend.read("a.txt") == b"edited"

    def test_what_was_left_out_stays_visible(self, folder: Path) -> None:
        fill(folder, {"notes.psd": b"P"})
        (folder / "out.png").symlink_to("/etc/hostname")
        with staged(folder) as backend:
            assert [item.path for item in backend.survey().unselected] == ["notes.psd"]
            assert [item.path for item in backend.survey().left_out] == ["out.png"]
            fill(folder, {"more.psd": b"P"})
            (folder / "another.txt").symlink_to("/etc/hostname")
            backend.refresh()
            assert [item.path for item in backend.survey().unselected] == ["more.psd", "notes.psd"]
            assert [item.path for item in backend.survey().left_out] == ["another.txt", "out.png"]
            with attach_backend(from_json(to_json(backend.handle()))) as elsewhere:
                assert elsewhere.survey().left_out == backend.survey().left_out

    def test_a_backend_closed_during_a_refresh_keeps_nothing(self, folder: Path) -> None:
        class ClosesWhileRead(LocalBackend):
            victim: InMemoryBackend | None = None

            def open(self, path: str):  # type: ignore[no-untyped-def]
                if self.victim is not None:
                    self.victim.close()
                return super().open(path)

        before = held()
        source = ClosesWhileRead(folder)
        backend = staged(source)
        fill(folder, {"d.png": b"D"})
        source.victim = backend
        backend.refresh()
        assert held() == before

    def test_two_at_once_stage_once(self, folder: Path) -> None:
        source = SlowBackend(LocalBackend(folder))
        with staged(source) as backend:
            fill(folder, {"d.png": b"D"})
            source.latency_seconds = 0.05
            with ThreadPoolExecutor(2) as pool:
                seen = [future.result() for future in [pool.submit(backend.refresh) for _ in range(2)]]
            assert sorted(one.added for one in seen) == [(), ("d.png",)]
            assert len(backend.descriptors()) == 2


class TestRelease:
    def test_closing_gives_everything_back(self, folder: Path) -> None:
        before = held()
        backend = staged(folder)
        assert held() > before
        (folder / "a.txt").write_bytes(b"edited")
        backend.refresh()
        backend.close()
        backend.close()
        assert held() == before

    def test_a_forgotten_backend_gives_everything_back(self, folder: Path) -> None:
        before = held()
        backend = staged(folder)
        with pytest.warns(ResourceWarning):
            del backend
        assert held() == before

    def test_an_exception_gives_everything_back(self, folder: Path) -> None:
        before = held()
        with pytest.raises(ZeroDivisionError), staged(folder):
            raise ZeroDivisionError
        assert held() == before

    def test_a_closed_backend_says_so(self, folder: Path) -> None:
        backend = staged(folder)
        backend.close()
        for call in (backend.read, backend.stat, backend.open, backend.exists, backend.delete):
            with pytest.raises(StagingError, match="closed"):
                call("a.txt")
        for act in (backend.list, backend.refresh, backend.handle):
            with pytest.raises(StagingError, match="closed"):
                act()

    def test_the_memory_is_really_free_again(self, tmp_path: Path) -> None:
        fill(tmp_path, {f"{number}.png": os.urandom(8 * MIB) for number in range(8)})
        before = _shared_memory()
        backend = staged(tmp_path)
        during = _shared_memory()
        backend.close()
        assert during - before > 60 * MIB
        assert _shared_memory() - before < 20 * MIB


class TestHandle:
    def test_travels_as_json(self, folder: Path) -> None:
        with staged(folder) as backend:
            handle = backend.handle()
            assert from_json(to_json(handle)) == handle
            assert isinstance(handle, StagedHandle)
            assert (handle.format, handle.pid, handle.root) == (2, os.getpid(), str(folder))

    def test_attaching_shows_the_same_pages(self, folder: Path) -> None:
        before = held()
        with staged(folder) as backend, attach_backend(backend.handle()) as other:
            assert isinstance(other, InMemoryBackend)
            assert contents(other) == FILES
            assert [segment.inode for segment in other.handle().segments] == [
                segment.inode for segment in backend.handle().segments
            ]
            with attach_backend(other.handle()) as third:
                assert contents(third) == FILES
        assert held() == before

    def test_carries_what_was_written_before(self, folder: Path) -> None:
        with staged(folder) as backend:
            backend.write("a.txt", b"a dog")
            backend.delete("a.jpg")
            with attach_backend(backend.handle()) as other:
                assert contents(other) == {"a.txt": b"a dog", "b/c.png": FILES["b/c.png"]}
                other.write("b/c.png", b"new")
                assert (folder / "b/c.png").read_bytes() == b"new"
                assert other.read("b/c.png") == b"new"

    def test_only_the_process_that_staged_refreshes(self, folder: Path) -> None:
        with staged(folder) as backend, attach_backend(backend.handle()) as other:
            assert isinstance(other, InMemoryBackend)
            with pytest.raises(StagingError, match="only the process that staged"):
                other.refresh()

    def test_a_source_that_cannot_be_reopened_leaves_the_reader_without_writes(self, folder: Path) -> None:
        with staged(SlowBackend(LocalBackend(folder))) as backend, attach_backend(backend.handle()) as other:
            assert contents(other) == FILES
            with pytest.raises(StagingError, match="without its source"):
                other.write("a.txt", b"")

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"pid": 2**22 + 1}, "has ended"),
            ({"started": 1}, "has ended"),
            ({"descriptor": 10**6}, "it has closed it"),
            ({"identity": "00" * 16}, "other staged data"),
            ({"size": 5}, "other staged data"),
        ],
    )
    def test_one_that_leads_elsewhere_is_refused(self, folder: Path, changes: dict[str, object], why: str) -> None:
        with staged(folder) as backend:
            handle = backend.handle()
            own = {key: value for key, value in changes.items() if key in StagedHandle.model_fields}
            other = {key: value for key, value in changes.items() if key not in own}
            segments = (handle.segments[0].model_copy(update=other),)
            before = held()
            with pytest.raises(StagingError, match=why):
                attach_backend(handle.model_copy(update={**own, "segments": segments}))
            assert held() == before

    def test_a_descriptor_that_means_something_else_by_now(self, folder: Path) -> None:
        with staged(folder) as backend, (folder / "a.txt").open("rb") as file:
            handle = backend.handle()
            segments = (handle.segments[0].model_copy(update={"descriptor": file.fileno()}),)
            with pytest.raises(StagingError, match="it has closed it"):
                attach_backend(handle.model_copy(update={"segments": segments}))

    @pytest.mark.parametrize("text", ["", "{}", '{"kind": "s3"}', '{"kind": "local", "root": "x", "more": 1}'])
    def test_text_that_is_none_is_refused(self, text: str) -> None:
        with pytest.raises(StagingError, match=r"no handle.*\n  try"):
            from_json(text)


def _shared_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))
