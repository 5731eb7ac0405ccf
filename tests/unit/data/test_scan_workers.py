from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.dataset_config import Dataset
from gracetune.data import scan_workers
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import open_backend
from gracetune.data.backends.paths import split_suffix
from gracetune.data.media_files import MediaFile, examine
from gracetune.data.scan import scan
from gracetune.data.scan_workers import ALONE, Threads, examine_files
from gracetune.testing.slow_backend import SlowBackend
from unit.data.backends.helpers import this_machine
from unit.data.folders import image, images, write


def thread_of(item: int) -> tuple[int, str]:
    return item, threading.current_thread().name


def wait_in_thread(item: int) -> tuple[int, str]:
    time.sleep(0.002)
    return thread_of(item)


class TestThreads:
    def test_one_thread_while_storage_is_fast(self) -> None:
        done = [*Threads(thread_of, 8).map(range(500))]
        assert [item for item, _ in done] == [*range(500)]
        assert {name for _, name in done} == {threading.current_thread().name}

    def test_several_threads_in_order_while_storage_is_slow(self) -> None:
        workers = Threads(wait_in_thread, 8)
        done = [*workers.map(range(200))]
        assert workers.waits
        assert [item for item, _ in done] == [*range(200)]
        assert {name for _, name in done[:ALONE]} == {threading.current_thread().name}
        assert len({name for _, name in done[ALONE:]}) == 8

    def test_one_thread_again_when_storage_becomes_fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scan_workers, "WAITING", 16)
        done = [*Threads(lambda item: (wait_in_thread if item < 20 else thread_of)(item), 4).map(range(100))]
        assert [item for item, _ in done] == [*range(100)]
        assert {name for _, name in done[48:]} == {threading.current_thread().name}

    def test_errors_reach_the_caller(self) -> None:
        def fail(item: int) -> int:
            time.sleep(0.001)
            return 1 // (50 - item)

        with pytest.raises(ZeroDivisionError):
            list(Threads(fail, 4).map(range(100)))

    def test_all_threads_read_a_slow_source(self, tmp_path: Path) -> None:
        slow = SlowBackend(LocalBackend(write(tmp_path, images(72, captions=False))), latency_seconds=0.01)
        began = time.monotonic()
        assert len(scan(slow, "image", workers=8).files) == 72
        assert time.monotonic() - began < 0.5 * 72 * 0.01, "one after the other they take twice as long, at least"


FILES = {**images(150, captions=False), "bad.png": b"x", "cut.png": image()[:-60], "é/ü.png": image()}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes start even for little work, and get a part of it."""
    monkeypatch.setattr(scan_workers, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(scan_workers, "_BATCH", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


@pytest.mark.usefixtures("two_cores")
class TestProcesses:
    @pytest.mark.parametrize("staged", [False, True])
    def test_results_equal_those_of_one_process(self, tmp_path: Path, staged: bool) -> None:
        folder = write(tmp_path, FILES)
        dataset = Dataset(id="d", path=str(folder), type="in_memory" if staged else "local")
        with open_backend(dataset, machine=this_machine()) as backend:
            files = [(path, stat.size) for path, stat in backend.survey().files.items()]
            message: list[int] = []

            def report(done: int) -> None:
                message.append(done)
                is_alone = done <= 2 * len(message)  # a busy machine starts the other process late
                time.sleep(0.5 if is_alone and len(message) < 40 else 0)

            found = examine_files(backend, "image", files, threads=2, on_done=report)
            alone = {path: examine(backend, path, "image", size) for path, size in files}
        assert found == alone
        assert message[-1] == len(files)
        assert len(message) < len(files) // 2, "this process would have reported each of its lots"
        assert {path for path, one in found.items() if not isinstance(one, MediaFile)} == {"bad.png", "cut.png"}

    @pytest.mark.parametrize(
        "program",
        [
            "",
            "print('no answer', flush=True)",
            "import sys; sys.stdin.readline(); print('[]', flush=True); sys.stdin.read()",
            "import os, sys; sys.stdin.readline(); sys.stdin.readline(); os.kill(os.getpid(), 9)",
            "import time; time.sleep(1000)",
        ],
        ids=["ends", "nonsense", "too few", "killed", "hangs"],
    )
    def test_the_batch_of_a_failed_process_is_done_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
    ) -> None:
        monkeypatch.setattr(scan_workers, "_PROGRAM", program)
        monkeypatch.setattr(scan_workers, "PATIENCE", 1.0)
        backend = LocalBackend(write(tmp_path, FILES))
        found = scan(backend, "image", on_scanned=lambda done, total: time.sleep(0.003))
        assert (len(found.files), len(found.unreadable)) == (151, 2)

    def test_without_descriptors_this_process_works_alone(self, tmp_path: Path) -> None:
        backend = LocalBackend(write(tmp_path, FILES))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = sorted({*range(1000)} - {int(path.name) for path in Path("/proc/self/fd").iterdir()})
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[4], before[1]))  # enough for files, not for three pipes
        try:
            found = scan(backend, "image")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert (len(found.files), len(found.unreadable)) == (151, 2)

    def test_without_threads_no_process_is_left_running(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[subprocess.Popen[bytes]] = []

        class Noted(subprocess.Popen[bytes]):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                started.append(self)

        def reject(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(subprocess, "Popen", Noted)
        monkeypatch.setattr(threading.Thread, "start", reject)
        found = scan(LocalBackend(write(tmp_path, FILES)), "image", workers=1)
        assert (len(found.files), len(found.unreadable)) == (151, 2)
        assert [one.returncode for one in started] == [-signal.SIGKILL], "tried once, and taken back"

    def test_another_thread_may_take_the_last_batch_at_any_moment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between checking for a batch and taking it."""

        class LateDeque(deque[Any]):
            looks = 0

            def __bool__(self) -> bool:
                type(self).looks += not len(self)
                return bool(len(self)) or self.looks == 2

        monkeypatch.setattr(scan_workers, "deque", LateDeque)
        backend = LocalBackend(write(tmp_path, FILES))
        assert len(examine_files(backend, "image", [("é/ü.png", 1)], threads=1, on_done=lambda done: None)) == 1
        assert LateDeque.looks > 2

    def test_files_of_the_current_folder_are_not_imported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        current = tmp_path / "here"
        current.mkdir()
        for name in ("json", "struct", "gracetune"):
            (current / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
        monkeypatch.chdir(current)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
        scan(LocalBackend(write(tmp_path / "data", FILES)), "image", on_scanned=lambda done, total: time.sleep(0.01))
        assert not (tmp_path / "imported").exists()


def _is_usual(path: str) -> bool:
    """Normalized. Newer releases of Python treat a final dot as an extension."""
    return str(PurePosixPath(path)) == path and path[-1] not in "./"


@given(st.text(alphabet="a./İé ", min_size=1, max_size=8).filter(_is_usual))
def test_extensions_are_split_as_pathlib_does(path: str) -> None:
    assert split_suffix(path) == (str(PurePosixPath(path).with_suffix("")), PurePosixPath(path).suffix)
