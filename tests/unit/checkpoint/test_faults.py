"""Killed processes and full disks: whatever happens, existing checkpoints are complete."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracetune.checkpoint.errors import CheckpointError, CheckpointFullError
from gracetune.checkpoint.store import CheckpointStore
from unit.cache.processes import Child, make_read_only, mount_tmpfs, own_mounts
from unit.checkpoint.states import IDENTITY, METADATA, Counter, Weights, begin, check, names, write

SIZE = 10_000
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")


def survives(folder: Path, at_least: int) -> int:
    """Check that checkpoints are complete and match their names, and that a run can start. Returns the last step."""
    with CheckpointStore(folder, 2) as store:
        for name in names(folder):
            if name.startswith("checkpoint-"):
                step = int(name.removeprefix("checkpoint-"))
                check(store.open(folder / name), step, SIZE)
        start = begin("latest", store, IDENTITY)
    assert start.step >= at_least, "a checkpoint that was complete is gone"
    assert (folder / "mine.txt").read_text() == "mine"
    assert not any(name.startswith(".gracetune-") for name in names(folder))
    return start.step


def train(folder: Path, first: int, count: int, report: Callable[[str], None]) -> None:
    with CheckpointStore(folder, 2, 10) as store:
        for step in range(first, first + count):
            store.write(step, [Weights(step, SIZE), Counter(value=step)], metadata=METADATA)
            store.wait()
            report(str(step))


def die_at(event_number: int, folder: Path) -> None:
    """Make this process kill itself (kill -9) just before its n-th access to that folder."""
    seen = 0

    def hook(event: str, details: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in _CHANGES and details and str(folder) in str(details[0]):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at(folder: Path, event_number: int) -> bool:
    """Returns whether the process was killed before it had finished."""

    def work(report: Callable[[str], None]) -> None:
        die_at(event_number, folder)
        train(folder, 11, 1, report)

    child = Child(work)
    while child.wait_for_word():
        pass
    _, status = os.waitpid(child.pid, 0)
    stated = child.lines
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), stated
    survives(folder, int(stated[-1]) if stated else 10)
    return os.waitstatus_to_exitcode(status) != 0


def test_killed_before_every_single_operation(tmp_path: Path) -> None:
    event_number, points = 0, 0
    while True:
        event_number += 1
        folder = tmp_path / str(event_number)
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
        with CheckpointStore(folder, 2) as store:
            write(store, 9, 10, size=SIZE)
        if not killed_at(folder, event_number):
            break
        points += 1
    assert points > 20, "making, filling, renaming and deleting folders were all hit"


def storm(tmp_path: Path, kills: int, longest: float) -> int:
    """Kill at any moment, also in the middle of a file, and resume. Returns how often the process was still running."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    randomness, done, alive = random.Random(5), 0, 0
    for _ in range(kills):
        child = Child(lambda report, first=done + 1: train(folder, first, 10_000, report))  # type: ignore[misc]
        if randomness.random() < 0.8:
            child.wait_for_word()
        time.sleep(randomness.random() * longest)
        child.kill()
        alive += child.status == -signal.SIGKILL
        stated = [int(word) for word in child.lines]
        done = survives(folder, max([done, *stated]))
    kept = [int(name.removeprefix("checkpoint-")) for name in names(folder) if name.startswith("checkpoint-")]
    assert all(step % 10 == 0 for step in sorted(kept)[:-3])
    assert done > 0
    return alive


def test_killed_at_any_moment(tmp_path: Path) -> None:
    assert storm(tmp_path, 12, 0.03) == 12


@pytest.mark.full
def test_killed_at_any_moment_three_hundred_times(tmp_path: Path) -> None:
    assert storm(tmp_path, 300, 0.08) == 300


class Unasking(CheckpointStore):
    """A store that skips the check for free space, as if another process filled the disk right after it."""

    def check_room(self, needed: int) -> None:
        pass


def test_a_disk_that_fills_up_in_the_middle(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        folder = tmp_path / "small"
        mount_tmpfs(folder, 4 << 20)
        store = Unasking(folder, 9)
        write(store, 1, size=SIZE)
        store.write(2, [Counter(), Weights(2, 2_000_000)], metadata=METADATA)
        with pytest.raises(CheckpointFullError) as caught:
            store.wait()
        problem = caught.value.problem
        assert "No space left on device (ENOSPC), at weights.safetensors" in problem.found
        assert "checkpoint-1 is complete" in problem.key
        assert problem.expected.startswith("9.")
        assert f"df -h {folder}" in problem.hint
        assert names(folder) == ["checkpoint-1"]
        check(store.open(folder / "checkpoint-1"), 1, SIZE)
        # Nothing is wrong with the store: it goes on.
        write(store, 3, size=SIZE)
        store.close()
        assert names(folder) == ["checkpoint-1", "checkpoint-3"]

    Child(work).join()


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        folder = tmp_path / "small"
        mount_tmpfs(folder, 3 << 20)
        with CheckpointStore(folder, 9) as store:
            write(store, 1, size=SIZE)
            with pytest.raises(
                CheckpointFullError, match=r"not enough disk space for a checkpoint; .*checkpoint-1 is complete"
            ):
                store.write(2, [Weights(2, 1_000_000)], metadata=METADATA)
        assert names(folder) == ["checkpoint-1"]

    Child(work).join()


@pytest.mark.parametrize("surface", ["write", "finished", "close", "exit"])
def test_an_error_of_the_writer_surfaces_at_the_next_call_and_at_the_end(tmp_path: Path, surface: str) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        mount_tmpfs(tmp_path / "small", 4 << 20)
        store = Unasking(tmp_path / "small", 9)
        write(store, 1, size=SIZE)
        store.write(2, [Weights(2, 2_000_000)], metadata=METADATA)
        with pytest.raises(CheckpointFullError, match=r"not written; .*checkpoint-1 is complete"):
            act(store, surface)
        store.close()
        assert names(tmp_path / "small") == ["checkpoint-1"]

    Child(work).join()


def act(store: CheckpointStore, surface: str) -> None:
    if surface == "write":
        store.write(4, [Counter()], metadata=METADATA)
    elif surface == "close":
        store.close()
    elif surface == "exit":
        with store:
            pass
    else:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            store.finished()
            time.sleep(0.01)


def test_an_error_while_another_is_on_its_way_is_added_to_it(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        mount_tmpfs(tmp_path / "small", 4 << 20)

        def training() -> None:
            with Unasking(tmp_path / "small", 9) as store:
                store.write(3, [Weights(2, 2_000_000)], metadata=METADATA)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            training()
        assert "the last checkpoint was not written" in caught.value.__notes__[0]

    Child(work).join()


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        own_mounts()
        folder = tmp_path / "checkpoints"
        with CheckpointStore(folder, 3) as store:
            write(store, 1, size=SIZE)
        make_read_only(folder)
        check(store.open(folder / "checkpoint-1"), 1, SIZE)
        with pytest.raises(CheckpointError, match=r"Read-only file system \(EROFS\)"):
            CheckpointStore(folder, 3).claim(IDENTITY)

    Child(work).join()


@pytest.mark.full  # starts Python and torch anew
def test_a_process_that_ends_without_closing_still_finishes_its_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from unit.checkpoint.states import *\n"
        "store = CheckpointStore(Path(sys.argv[1]), 3)\n"
        "store.write(5, [Weights(5, 3_000_000), Counter(value=5)], metadata=METADATA)\n"
    )
    tests = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(
        command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent / 'src'}"}
    )
    check(CheckpointStore(tmp_path, 3).open(tmp_path / "checkpoint-5"), 5, 3_000_000)
