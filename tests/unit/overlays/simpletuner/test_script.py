"""`scripts/test_upstream_features.sh` where there is no upstream: what it says, and its exit codes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unit.overlays.simpletuner.conftest import ROOT


def run(*flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "test_upstream_features.sh")
    variables = dict(os.environ) | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src")} | more
    return subprocess.run([script, *flags], capture_output=True, text=True, check=False, env=variables)


def test_without_upstream_everything_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run("--venv", str(tmp_path / "none"), "--audio", "--manual-validation", "--backend", "flash_attn_3")
    assert done.returncode == 77
    assert done.stdout.count(f"no SimpleTuner in {tmp_path / 'none'}; --install makes one") >= 3
    assert "0 passed, 0 failed" in done.stdout


def test_an_install_that_cannot_be_done_ends_it_at_any_level(tmp_path: Path) -> None:
    flags = ("--install", "--level", "integration", "--venv", str(tmp_path / "none"))
    done = run(*flags, UPSTREAM_PYTHON=str(tmp_path / "python"))
    assert done.returncode == 1
    assert "found     no Python 3.12 to 3.14" in done.stderr
    assert "skipped" not in done.stdout


def test_help_names_the_flags_and_a_wrong_one_is_rejected() -> None:
    stated = run("--help")
    assert stated.returncode == 0
    for flag in ("--install", "--venv", "--attention", "--manual-validation", "--audio", "--diagnostic", "--backend"):
        assert flag in stated.stdout
    assert "pin_memory" in stated.stdout
    assert run("--instal").returncode == 2
    assert run("--venv").returncode == 2


def test_an_attention_backend_that_upstream_does_not_have_is_rejected_with_those_it_has() -> None:
    done = run("--backend", "flash_attn_33")
    assert done.returncode == 2
    assert "found     --backend flash_attn_33" in done.stderr
    assert "flash-attn-3 " in done.stderr
    assert "--backend diffusers" in done.stderr


def test_a_run_that_never_ends_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "upstream_features"))
    scenarios = importlib.import_module("scenarios")
    monkeypatch.setattr(scenarios, "LONGEST_RUN_S", 2)
    code = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    read, write = os.pipe()  # held open by whatever still runs
    with os.fdopen(read) as pipe:
        with os.fdopen(write, "w") as log:
            assert scenarios._ended([sys.executable, "-c", code], tmp_path, dict(os.environ), log) is None
        assert pipe.read() == ""  # ends only when no process runs any more
    with (tmp_path / "log.txt").open("w") as log:
        monkeypatch.setattr(scenarios, "LONGEST_RUN_S", 600)
        assert scenarios._ended([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, {}, log) == 3


def test_no_path_of_a_machine_and_no_registry_is_in_it() -> None:
    folder = ROOT / "scripts"
    for file in (folder / "test_upstream_features.sh", *(folder / "upstream_features").glob("*.py")):
        text = file.read_text()
        assert not any(word in text for word in ("index-url", "pypi", "/opt/", "/work/", "/tmp/"))
