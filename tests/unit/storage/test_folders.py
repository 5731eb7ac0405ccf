"""Permissions of the folders we create. The umask belongs to a process, so each case runs in its own."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
from gracetune.storage.folders import make_private_folder, private_if_new
os.umask(int(sys.argv[1], 8))
make_private_folder(Path(sys.argv[2]) / "made")
for name in ("new", "old"):
    with private_if_new(Path(sys.argv[2]) / name):
        (Path(sys.argv[2]) / name / "inside").mkdir(parents=True)
"""


@pytest.mark.parametrize(
    ("umask", "parent", "made"),
    [
        ("022", 0o755, 0o700),
        ("077", 0o755, 0o700),
        ("027", 0o755, 0o700),
        ("002", 0o755, 0o770),
        ("007", 0o755, 0o770),
        ("000", 0o777, 0o770),
        ("022", 0o2775, 0o2750),
        ("002", 0o2775, 0o2770),
        ("077", 0o2775, 0o2700),
    ],
)
def test_the_group_gets_access_where_files_are_shared(tmp_path: Path, umask: str, parent: int, made: int) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "old").mkdir()
    (folder / "old").chmod(0o755)
    folder.chmod(parent)
    subprocess.run([sys.executable, "-c", SCRIPT, umask, str(folder)], check=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"made": made, "new": made, "old": 0o755}


def test_parent_folders_are_ordinary(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, "022", str(tmp_path / "above")], check=True)
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o777 & ~0o022
    assert os.access(tmp_path / "above" / "made", os.W_OK)
