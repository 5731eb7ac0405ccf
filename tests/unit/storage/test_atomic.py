from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracetune.storage.atomic import (
    new_folder,
    replacing,
    sweep,
    sweep_folders,
    sync_folder,
    unfinished,
    write_file,
    write_new,
)


def test_a_folder_is_synced(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    sync_folder(str(tmp_path))


def test_sync_ignores_file_systems_without_folder_sync() -> None:
    sync_folder("/proc")  # answers EINVAL


def test_sync_folder_rejects_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "absent")


class TestWriting:
    def test_replaces_the_file_and_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        for content in (b"old", b"new"):
            write_file(tmp_path / "a.txt", content)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.txt": b"new"}

    def test_obeys_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            write_file(tmp_path / "new.txt", b"")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "new.txt").stat().st_mode) == 0o640

    def test_the_old_file_stays_until_the_new_one_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.txt").write_bytes(b"old")

        def crash(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", crash)
        with pytest.raises(OSError, match="Input/output error") as failed:
            write_file(tmp_path / "a.txt", b"half")
        assert failed.value.filename == str(tmp_path / "a.txt"), "fsync itself names no file"
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.txt": b"old"}

    def test_a_full_disk_keeps_the_old_file(self, tiny_disk: Path) -> None:
        write_file(tiny_disk / "a.txt", b"old")
        with pytest.raises(OSError, match="No space left"):
            write_file(tiny_disk / "a.txt", b"x" * 200_000)
        assert {file.name: file.read_bytes() for file in tiny_disk.iterdir()} == {"a.txt": b"old"}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_without_replace_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a.txt", b"new", replace=False)
    assert contents(tmp_path) == {"a.txt": b"old"}


def test_chunks_of_any_size_are_written_in_order(tmp_path: Path) -> None:
    chunks = [bytes([number % 256]) * (number % 7) for number in range(2000)] + [b"x" * 9_000_000, b"end"]
    write_file(tmp_path / "a.bin", (memoryview(chunk) for chunk in chunks))
    assert (tmp_path / "a.bin").read_bytes() == b"".join(chunks)


def test_replacing_accepts_a_library_that_replaces_the_temporary_file(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.txt") as temporary:
        (tmp_path / "beside").write_bytes(b"new")
        (tmp_path / "beside").rename(temporary)
    assert contents(tmp_path) == {"a.txt": b"new"}


def test_sweep_removes_only_files_of_ended_processes(tmp_path: Path) -> None:
    left = [tmp_path / f"{dot}gracetune-{'a' * 32}.tmp" for dot in ("", ".")]
    for path in left:
        path.touch()
    with unfinished(tmp_path) as (_, held):
        assert sweep(tmp_path) == len(left)
        assert [*tmp_path.iterdir()] == [held]


# -- killed at every boundary: what is there is the old or the new, complete, and what is left can be told ------------


def replace_a_file(folder: Path) -> None:
    write_file(folder / "name", [b"new", b" content"])


def let_a_library_write(folder: Path) -> None:
    with replacing(folder / "name") as temporary:
        temporary.write_bytes(b"new content")


def publish_a_folder(folder: Path) -> None:
    with new_folder(folder / "folder") as temporary:
        (temporary / "below").mkdir()
        (temporary / "below" / "one").write_bytes(b"1")
        write_new(temporary / "two", [b"2"])


OLD, NEW = {"name": b"old"}, {"name": b"new content"}
FOLDER = {"name": b"old", "folder/below/one": b"1", "folder/two": b"2"}


@pytest.mark.parametrize(
    ("write", "after"), [(replace_a_file, NEW), (let_a_library_write, NEW), (publish_a_folder, FOLDER)]
)
def test_killed_at_any_point_the_old_or_the_new_file_is_complete(
    write: Callable[[Path], None], after: dict[str, bytes], tmp_path: Path
) -> None:
    seen, number, ended = [], 0, False
    while not ended:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "name").write_bytes(b"old")
        ended = not killed_at(number, lambda: write(folder))  # noqa: B023 - called at once
        sweep(folder)
        sweep_folders(folder)
        seen.append(contents(folder))
        number += 1
    assert number >= 4, "fsync of the file, rename, fsync of the folder, and the run that nothing killed"
    assert seen[0] == OLD
    assert seen[-1] == after
    assert seen == [OLD] * seen.count(OLD) + [after] * seen.count(after)


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Run in a new process that is killed just before its n-th fsync or rename. False if it ran to the end."""
    child = os.fork()
    if child == 0:
        calls = 0

        def guarded(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal calls
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return function(*arguments, **options)

            return call

        for name in ("fsync", "rename", "replace", "link"):
            setattr(os, name, guarded(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
