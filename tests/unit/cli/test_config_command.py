from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracetune.cli.main import main

GOOD = {
    "gracetune": 1,
    "name": "run",
    "output_dir": "out",
    "model": {"family": "sdxl"},
    "datasets": [{"id": "a", "path": "somewhere/else"}],
    "training": {"max_steps": 10},
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def write(path: Path, data: Any) -> str:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return str(path)


def test_check_names_every_file_and_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write(tmp_path / "good.yaml", GOOD), write(tmp_path / "bad.yaml", {**GOOD, "nam": 1})
    assert run("config", "check", "--no-paths", "--json", good, bad, str(tmp_path / "none.json")) == 1
    report = json.loads(capsys.readouterr().out)
    first, second, third = report["files"]
    assert (first["ok"], first["dialect"], first["problems"]) == (True, "native", [])
    assert second["ok"] is False
    assert set(second["problems"][0]) >= {"key", "found", "expected", "hint"}
    assert second["problems"][0]["hint"] == "write `name`"
    assert third["dialect"] is None
    assert third["problems"][0]["found"] == "no file there"


def test_check_looks_for_folders_unless_no_paths_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "good.yaml", GOOD)
    assert run("config", "check", path) == 1
    assert "--no-paths" in capsys.readouterr().out
    assert run("config", "check", "--no-paths", path) == 0


def test_no_paths_ignores_the_variables_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GH200_UVM_STAGE1_THRESHOLD", "7")
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "good.yaml", {**GOOD, "datasets": [{"id": "a", "path": str(tmp_path / "data")}]})
    assert run("config", "check", path) == 1
    assert run("config", "check", "--no-paths", path) == 0


def test_a_folder_among_files_is_skipped_and_alone_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "good.yaml", GOOD)
    (tmp_path / "sidecars").mkdir()
    assert run("config", "check", "--no-paths", path, str(tmp_path / "sidecars")) == 0
    assert "a folder, not checked" in capsys.readouterr().err
    assert run("config", "check", str(tmp_path / "sidecars")) == 1


def test_show_prints_values_with_their_origin_and_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "good.yaml", GOOD)
    assert run("config", "show", path, "--set", "training.batch_size=4") == 0
    text = capsys.readouterr().out
    assert "batch_size: 4" in text
    assert "# flag --set training.batch_size" in text
    again = tmp_path / "again.yaml"
    again.write_text(text, encoding="utf-8")
    assert run("config", "show", str(again), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["training"]["batch_size"] == 4
    assert shown["origins"]["training.batch_size"]["kind"] == "file"
    assert shown["origins"]["model.family"]["where"] == str(again)


def test_the_schema_describes_the_native_dialect(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["gracetune"] == {"const": 1, "description": "Version of the format."}
    assert schema["required"][0] == "gracetune"


def test_errors_are_messages_on_stderr_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", str(tmp_path / "none.yaml")) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "found     no file there" in streams.err
    assert run("config", "frobnicate") == 2


def test_allocator_options_are_removed_before_torch_is_imported(tmp_path: Path) -> None:
    path = write(tmp_path / "good.yaml", GOOD)
    code = (
        "import os, sys\nfrom gracetune.cli.main import main\n"
        f"sys.argv = ['gracetune', 'config', 'show', {path!r}, '--json']\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code, stop.code\n"
        "assert os.environ['PYTORCH_CUDA_ALLOC_CONF'] == 'max_split_size_mb:64'\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,use_uvm:True",
             "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "took use_uvm" in done.stderr
    shown = json.loads(done.stdout)
    assert shown["config"]["memory"]["use_uvm"] is True
    assert shown["origins"]["memory.use_uvm"] == {"kind": "environment", "where": "", "key": "PYTORCH_CUDA_ALLOC_CONF"}
