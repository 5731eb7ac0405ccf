"""Real processes: two ranks that share the data, and a run that is killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unit.data.folders import image, images, write

SCRIPT = Path(__file__).parent / "training_process.py"
SCHEDULE = [1, 2, 2, 3]
BATCHES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"), images(17))


def start(folder: Path, work: Path, **arguments: Any) -> subprocess.Popen[bytes]:
    work.mkdir(exist_ok=True)
    defaults = {"rank": 0, "world_size": 1, "schedule": SCHEDULE, "batches": BATCHES}
    order = json.dumps({"folder": str(folder), "work": str(work), **defaults, **arguments})
    return subprocess.Popen([sys.executable, str(SCRIPT), order])


def log(work: Path) -> list[dict[str, Any]]:
    """Complete lines only: a killed process may leave a partial one."""
    lines = (work / "log").read_text().split("\n")[:-1] if (work / "log").exists() else []
    return [json.loads(line) for line in lines]


def finished(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        assert process.wait(timeout=60) == 0


def test_two_ranks_share_every_batch_of_one(folder: Path, tmp_path: Path) -> None:
    finished(
        start(folder, tmp_path / "0", rank=0, world_size=2),
        start(folder, tmp_path / "1", rank=1, world_size=2),
        start(folder, tmp_path / "alone", schedule=[2 * size for size in SCHEDULE]),
    )
    one, other, alone = (log(tmp_path / name) for name in ("0", "1", "alone"))
    assert len(one) == len(other) == len(alone) == BATCHES
    assert {call["kind"] for call in alone} == {"BatchRef", "EpochEnd"}
    for left, right, whole in zip(one, other, alone, strict=True):
        assert left["kind"] == right["kind"] == whole["kind"]
        if whole["kind"] == "BatchRef":
            parts = [part for part in (left, right) if not part["padding"]]
            assert [sample for part in parts for sample in part["samples"]] == whole["samples"]
            assert [index for part in parts for index in part["indexes"]] == whole["indexes"]


@pytest.mark.parametrize("damaged", [False, True], ids=["whole files", "files found damaged on the way"])
def test_a_killed_run_resumes_with_the_identical_rest(folder: Path, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        folder = write(tmp_path / "data", images(17))
        for name in ("wounded.png", "another.png"):
            data = bytearray(image(200, 200, seed=ord(name[0])))
            data[300:2_000] = bytes(1_700)
            write(folder, {name: bytes(data)})
    work = tmp_path / "killed"
    process = start(folder, work, pause=0.01)
    deadline = time.monotonic() + 60
    while len(log(work)) < 23:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    saved = json.loads((work / "state").read_text())["done"]
    assert 22 <= saved < BATCHES

    resumed = tmp_path / "resumed"
    resumed.mkdir()
    (resumed / "from").write_bytes((work / "state").read_bytes())
    finished(start(folder, resumed, state=str(resumed / "from")), start(folder, tmp_path / "whole"))
    whole = log(tmp_path / "whole")
    assert log(work)[:saved] == whole[:saved]
    assert log(resumed) == whole[saved:]
    assert len(log(resumed)) == BATCHES - saved
    excluded = json.loads((tmp_path / "whole" / "state").read_text())["loader"]["excluded"]
    seen = {sample["path"] for call in whole if call["kind"] == "BatchRef" for sample in call["samples"]}
    bad = {"wounded.png", "another.png"} if damaged else set()
    assert {name: set(files) for name, files in excluded.items()} == ({"a": bad, "b": bad} if damaged else {})
    assert not bad & seen
