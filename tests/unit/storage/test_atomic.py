from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracetune.storage.atomic import sync_folder, write_file


def test_a_folder_is_synced(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    sync_folder(str(tmp_path))


def test_a_file_system_that_cannot_is_no_failure() -> None:
    sync_folder("/proc")  # answers EINVAL


def test_what_is_no_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "absent")


class TestWriting:
    def test_replaces_and_leaves_nothing_else(self, tmp_path: Path) -> None:
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

    def test_the_old_file_is_there_until_the_new_one_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.txt").write_bytes(b"old")

        def crash(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", crash)
        with pytest.raises(OSError, match="Input/output error"):
            write_file(tmp_path / "a.txt", b"half")
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.txt": b"old"}

    def test_a_full_disk_keeps_what_was_there(self, tiny_disk: Path) -> None:
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
