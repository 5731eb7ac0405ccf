from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.durable import sync_folder


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
