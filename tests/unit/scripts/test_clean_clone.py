"""What a newcomer types, in a folder that holds what a clone would. Needs the network: everything is installed anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files git knows or would add: a change need not be committed to be tried."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    clone = tmp_path / "gracetune"
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        if not (ROOT / name).is_file():
            continue  # deleted, but not yet in a commit
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    return clone


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_demo_works_at_once_and_installs_once(clone: Path, login: dict[str, str]) -> None:
    environment = login | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def make(target: str) -> tuple[subprocess.CompletedProcess[str], float]:
        started = time.perf_counter()
        command = ["make", "--no-print-directory", target]
        done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
        return done, time.perf_counter() - started

    first, _ = make("demo")
    assert first.returncode == 0, first.stdout + first.stderr
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}  # any call of pip now fails
    prepared, seconds = make("environment")
    assert (prepared.returncode, prepared.stdout) == (0, "")
    assert seconds < 2
