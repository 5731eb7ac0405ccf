from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import attach_backend
from gracetune.data.backends.storage import StagedHandle, from_json, to_json
from gracetune.data.errors import MissingFileError, OutsideRootError
from gracetune.hostmem.errors import StagingError
from gracetune.testing.slow_backend import SlowBackend
from unit.data.backends.helpers import MIB, contents, fill, held, staged

FILES = {"a.jpg": b"A" * 5000, "a.txt": b"a cat", "b/c.png": b"C" * 100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "data", FILES)


def test_the_source_is_not_accessed_again(folder: Path) -> None:
    source = SlowBackend(LocalBackend(folder))
    with staged(source) as backend:
        requested = source.requests
        source.latency_seconds = 60.0  # the disk goes away
        started = time.perf_counter()
        assert contents(backend) == FILES
        assert [backend.stat(path).size for path in backend.list()] == [5000, 5, 100]
        assert backend.exists("a.txt")
        with backend.open("a.jpg") as stream:
            assert stream.read() == FILES["a.jpg"]
        assert time.perf_counter() - started < 5
        assert source.requests == requested


class TestSnapshot:
    def test_later_changes_are_not_seen(self, folder: Path) -> None:
        with staged(folder) as backend:
            (folder / "a.txt").write_bytes(b"edited")
            (folder / "b/c.png").unlink()
            fill(folder, {"d.png": b"D"})
            assert contents(backend) == FILES

    def test_unstaged_files_are_missing(self, folder: Path) -> None:
        fill(folder, {"notes.psd": b"P"})
        with staged(folder) as backend, pytest.raises(MissingFileError, match="not among the staged files"):
            backend.read("notes.psd")

    @pytest.mark.parametrize("path", ["../a.jpg", "/etc/passwd", "b\\c.png", "a\0", ""])
    def test_no_way_out(self, folder: Path, path: str) -> None:
        with staged(folder) as backend:
            for call in (backend.read, backend.stat, backend.open, backend.exists):
                with pytest.raises(OutsideRootError):
                    call(path)

    def test_a_restart_sees_the_folder_as_it_is(self, folder: Path) -> None:
        staged(folder).close()
        (folder / "a.txt").write_bytes(b"edited")
        with staged(folder) as backend:
            assert backend.read("a.txt") == b"edited"

    def test_left_out_files_stay_listed(self, folder: Path) -> None:
        fill(folder, {"notes.psd": b"P"})
        (folder / "out.png").symlink_to("/etc/hostname")
        with staged(folder) as backend:
            assert [item.path for item in backend.survey().unselected] == ["notes.psd"]
            assert [item.path for item in backend.survey().left_out] == ["out.png"]
            with attach_backend(from_json(to_json(backend.handle()))) as elsewhere:
                assert elsewhere.survey().left_out == backend.survey().left_out


class TestRelease:
    def test_closing_frees_everything(self, folder: Path) -> None:
        before = held()
        backend = staged(folder)
        assert held() > before
        backend.close()
        backend.close()
        assert held() == before

    def test_garbage_collection_frees_everything(self, folder: Path) -> None:
        before = held()
        backend = staged(folder)
        with pytest.warns(ResourceWarning):
            del backend
        assert held() == before

    def test_an_exception_frees_everything(self, folder: Path) -> None:
        before = held()
        with pytest.raises(ZeroDivisionError), staged(folder):
            raise ZeroDivisionError
        assert held() == before

    def test_a_closed_backend_raises(self, folder: Path) -> None:
        backend = staged(folder)
        backend.close()
        for call in (backend.read, backend.stat, backend.open, backend.exists):
            with pytest.raises(StagingError, match="closed"):
                call("a.txt")
        for act in (backend.list, backend.handle):
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
            assert (handle.format, handle.pid, handle.root) == (3, os.getpid(), str(folder))

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

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"pid": 2**22 + 1}, "has ended"),
            ({"started": 1}, "has ended"),
            ({"descriptor": 10**6}, "has closed it"),
            ({"identity": "00" * 16}, "other staged data"),
            ({"size": 5}, "other staged data"),
        ],
    )
    def test_a_wrong_handle_is_rejected(self, folder: Path, changes: dict[str, object], why: str) -> None:
        with staged(folder) as backend:
            handle = backend.handle()
            own = {key: value for key, value in changes.items() if key in StagedHandle.model_fields}
            other = {key: value for key, value in changes.items() if key not in own}
            segments = (handle.segments[0].model_copy(update=other),)
            before = held()
            with pytest.raises(StagingError, match=why):
                attach_backend(handle.model_copy(update={**own, "segments": segments}))
            assert held() == before

    def test_a_reused_descriptor_number_is_rejected(self, folder: Path) -> None:
        with staged(folder) as backend, (folder / "a.txt").open("rb") as file:
            handle = backend.handle()
            segments = (handle.segments[0].model_copy(update={"descriptor": file.fileno()}),)
            with pytest.raises(StagingError, match="has closed it"):
                attach_backend(handle.model_copy(update={"segments": segments}))

    @pytest.mark.parametrize("text", ["", "{}", '{"kind": "s3"}', '{"kind": "local", "root": "x", "more": 1}'])
    def test_invalid_handles_are_rejected(self, text: str) -> None:
        with pytest.raises(StagingError, match=r"handle cannot be read.*\n  try"):
            from_json(text)


def _shared_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))
