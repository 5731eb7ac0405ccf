from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from gracetune.baselines.baseline import SMI_LOG
from gracetune.baselines.machine_probe import SmiLog, measure_probe, merge_probes
from gracetune.config.environment import Environment


def test_the_same_work_is_timed_before_and_after() -> None:
    one = measure_probe(torch.device("cpu"))
    assert one.what == "a float32 matrix product of side 512 on cpu"
    assert len(one.gemm_ms) == len(one.copy_ms) == 20
    assert min(one.gemm_ms + one.copy_ms) > 0
    twice = merge_probes(one, one.model_copy(update={"gemm_ms": (1.0,), "copy_ms": (2.0,)}))
    assert (twice.what, twice.gemm_ms, twice.copy_ms) == (one.what, (*one.gemm_ms, 1.0), (*one.copy_ms, 2.0))


def smi(folder: Path, script: str) -> SmiLog:
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return SmiLog(folder, Environment({"PATH": f"{program.parent}:/usr/bin:/bin"}))


def wait_for_text(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestNvidiaSmi:
    def test_writes_until_it_is_stopped(self, tmp_path: Path) -> None:
        log = smi(tmp_path, 'echo "$@"; exec sleep 600')
        log.start()
        wait_for_text(tmp_path / SMI_LOG)
        assert log.stop() == SMI_LOG
        assert "--query-gpu=timestamp,index" in (tmp_path / SMI_LOG).read_text()
        assert "--loop=1" in (tmp_path / SMI_LOG).read_text()

    def test_that_fails_says_why_and_leaves_no_file(self, tmp_path: Path) -> None:
        log = smi(tmp_path, "trap '' TERM; echo 'could not talk to the driver'; exit 9")
        log.start()
        wait_for_text(tmp_path / SMI_LOG)
        assert log.stop() == "not available: nvidia-smi ended with 9: could not talk to the driver"
        assert not (tmp_path / SMI_LOG).exists()

    @pytest.mark.parametrize("variables", [{}, {"PATH": "/nowhere"}])
    def test_that_is_not_there_says_so(self, variables: dict[str, str], tmp_path: Path) -> None:
        log = SmiLog(tmp_path, Environment(variables))
        log.start()
        assert log.stop() == "not available: no nvidia-smi on the PATH"
        assert list(tmp_path.iterdir()) == []

    def test_that_cannot_be_run_says_so(self, tmp_path: Path) -> None:
        log = smi(tmp_path, "")
        (tmp_path / "bin" / "nvidia-smi").write_bytes(b"\x7fELF, but not really")
        log.start()
        assert "Exec format error" in log.stop()
