from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gracetune.checkpoint.errors import BusyFolderError, CheckpointError
from gracetune.checkpoint.store import CheckpointStore
from gracetune.errors import ConfigError, GracetuneError, MachineError, Problem
from gracetune.telemetry.errors import TelemetryError
from gracetune.train.preflight_checks import Checks
from gracetune.train.runtime import LaunchEnvironment, Runtime

ALONE = Runtime(
    rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"), precision="fp32",
    launch=LaunchEnvironment(), key="",
)  # fmt: skip


def problem(key: str) -> Problem:
    return Problem(key, "this", "that", "type it")


def reject(error: Exception) -> int:
    raise error


def test_checks_of_a_rejected_value_are_skipped_and_all_others_reported() -> None:
    checks = Checks()
    good = checks.run(lambda: 3)
    bad = checks.run(lambda: reject(ConfigError([problem("model.path")])))
    follows = checks.run(lambda: bad.value + good.value)
    checks.run(lambda: reject(CheckpointError(problem("a checkpoint"))))
    checks.run(lambda: reject(TelemetryError("logging.webhook", found="this", expected="that", hint="type it")))
    checks.run(lambda: reject(MachineError("no such GPU; use another")))
    assert (good.value, bad.is_rejected, follows.is_known, follows.is_rejected) == (3, True, False, False)
    with pytest.raises(ConfigError) as rejected:
        checks.raise_all(ALONE)
    keys = [one.key for one in rejected.value.problems]
    assert keys == ["model.path", "a checkpoint", "logging.webhook", "this run"]
    assert rejected.value.problems[-1].found == "no such GPU; use another"


def test_a_single_error_is_raised_unchanged_and_no_error_passes() -> None:
    checks = Checks()
    checks.raise_all(ALONE)
    error = MachineError("no such GPU; use another")
    checks.run(lambda: reject(error))
    with pytest.raises(MachineError) as rejected:
        checks.raise_all(ALONE)
    assert rejected.value is error


def test_a_key_with_a_known_problem_is_not_reported_again() -> None:
    checks = Checks([("model.path", problem("pretrained_model_name_or_path"))])
    assert checks.run(lambda: reject(ConfigError([problem("model.path")]))).is_rejected
    with pytest.raises(ConfigError) as rejected:
        checks.raise_all(ALONE)
    assert [one.key for one in rejected.value.problems] == ["pretrained_model_name_or_path"]


def test_an_error_of_another_type_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        Checks().run(lambda: reject(ZeroDivisionError()))


def test_checking_a_folder_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one" / "checkpoints"
    CheckpointStore(folder, 1).check_claim()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(GracetuneError, match="Not a directory"):
        CheckpointStore(folder, 1).check_claim()
    (tmp_path / "runs").unlink()
    with CheckpointStore(folder, 1) as other:
        other.claim({"name": "other"})
        with pytest.raises(BusyFolderError):
            CheckpointStore(folder, 1).check_claim()
    CheckpointStore(folder, 1).check_claim()
