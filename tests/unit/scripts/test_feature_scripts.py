"""scripts/test_*_features.sh: flags, exit codes and the table every day; what they test only where there is time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
NAMES = ("test_gh200_features.sh", "test_combined_features.sh")
TRIAL = """#!/usr/bin/env bash
set -euo pipefail
source "$SCRIPTS/feature_tests.sh"
fails_in_the_middle() { false; true; }
cannot() { echo "no such device"; return "$FT_SKIPPED"; }
leaves_its_folder() { echo "$ft_work" >"$SEEN"; }
ft_own_flag() { if [ "$1" = --own ]; then own=$2; return 2; fi; }
ft_begin "A trial." "attention audio" "$@"
ft_check unit attention "passes" leaves_its_folder
ft_check unit audio "fails" fails_in_the_middle
ft_check system audio "skips" cannot
ft_skip system attention "is left out" "a reason"
ft_end
"""


def bash(script: Path, *flags: str, seconds: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        ["bash", str(script), *flags],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**kept, "PYTHON": sys.executable, "SCRIPTS": str(SCRIPTS), **variables},
    )


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "trial.sh"
    path.write_text(TRIAL)
    return path


class TestTheCommonPart:
    def test_a_failure_is_exit_code_1_and_all_is_in_the_table(self, trial: Path, tmp_path: Path) -> None:
        done = bash(trial, "--own", "x", SEEN=str(tmp_path / "seen"))
        assert done.returncode == 1, done.stderr
        table = [line.split() for line in done.stdout.partition("result ")[2].splitlines()[1:5]]
        assert [row[:3] for row in table] == [
            ["ok", "unit", "attention"],
            ["FAILED", "unit", "audio"],
            ["skipped", "system", "audio"],
            ["skipped", "system", "attention"],
        ]
        assert "no such device" in done.stdout
        assert done.stdout.rstrip().endswith("1 passed, 1 failed, 2 skipped")
        assert not Path((tmp_path / "seen").read_text().strip()).exists()

    @pytest.mark.parametrize(
        ("flags", "code", "last"),
        [
            (["--attention", "--level", "unit"], 0, "1 passed, 0 failed, 0 skipped"),
            (["--backend", "any", "--level", "unit"], 0, "1 passed, 0 failed, 0 skipped"),
            (["--level", "system"], 77, "nothing could be run"),
            (["--level", "performance"], 77, "nothing could be run"),
        ],
    )
    def test_flags_choose(self, flags: list[str], code: int, last: str, trial: Path, tmp_path: Path) -> None:
        done = bash(trial, *flags, SEEN=str(tmp_path / "seen"))
        assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last)

    def test_a_capture_that_fails_is_a_failure_whatever_the_comparison_says(self, tmp_path: Path) -> None:
        script = tmp_path / "trial.sh"
        script.write_text(
            "set -euo pipefail\n"
            'source "$SCRIPTS/feature_tests.sh"\n'
            "ft_make_job() { :; }\n"
            'ft_gracetune() { if [ "$2" = capture ]; then return 5; fi; }\n'
            'ft_begin "A trial." "audio" "$@"\n'
            'ft_check performance audio "pace" ft_capture_and_compare job flux\n'
            "ft_end\n"
        )
        done = bash(script)
        assert done.returncode == 1, done.stdout
        assert "FAILED   pace (exit code 5)" in done.stdout

    def test_an_environment_without_gracetune_is_told(self, trial: Path, base_python: Path) -> None:
        done = bash(trial, PYTHON=str(base_python), PYTHONPATH="")
        assert done.returncode == 1
        assert "bash scripts/bootstrap.sh" in done.stderr


@pytest.mark.parametrize("name", NAMES)
class TestBothScripts:
    def test_help_names_the_documented_flags(self, name: str) -> None:
        done = bash(SCRIPTS / name, "--help")
        assert done.returncode == 0
        for flag in ("attention", "manual-validation", "manual ", "backend NAME", "diagnostic", "audio", "level LEVEL"):
            assert f"--{flag}" in done.stdout

    @pytest.mark.parametrize(
        ("flags", "messages"),
        [
            (["--atention"], "a flag of this script"),
            (["--level", "smoke"], "one of: unit integration system performance"),
            (["--level"], "--level VALUE"),
            (["--backend", "flash4"], "flash_attn_3"),
            (["--baseline", "/nowhere/at/all"], "gracetune baseline capture CONFIG"),
        ],
    )
    def test_wrong_flags_are_exit_code_2(self, flags: list[str], messages: str, name: str) -> None:
        done = bash(SCRIPTS / name, *flags)
        assert done.returncode == 2
        assert messages in done.stderr
        assert not done.stdout

    def test_it_can_be_executed(self, name: str) -> None:
        assert os.access(SCRIPTS / name, os.X_OK)


@pytest.mark.full
def test_gh200_features_by_themselves() -> None:
    flags = ["--diagnostic", "--staging", "--level", "integration"]
    done = bash(SCRIPTS / "test_gh200_features.sh", *flags, seconds=290)
    assert done.returncode == 0, done.stdout
    assert " 0 failed" in done.stdout


@pytest.mark.full
def test_validation_by_hand_during_the_ramp() -> None:
    done = bash(SCRIPTS / "test_combined_features.sh", "--manual", "--level", "system", seconds=290)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 0 failed, 0 skipped" in done.stdout


@pytest.mark.full
def test_a_backend_that_is_not_here_is_skipped_with_its_reason() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("whether flash-attn 3 runs depends on this machine's GPU")
    flags = ["--backend", "flash_attn_3", "--level", "unit", "--level", "system"]
    done = bash(SCRIPTS / "test_combined_features.sh", *flags, seconds=290)
    assert done.returncode == 0, done.stdout
    assert "skipped  attention flash_attn_3: a whole run: flash_attn_3: " in done.stdout
    assert "1 passed, 0 failed, 1 skipped" in done.stdout
