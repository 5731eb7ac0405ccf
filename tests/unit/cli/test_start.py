"""What all entry points share: allocator options are claimed, errors become messages, and any terminal works."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer
import yaml

from gracetune.cli.console import Session, start
from gracetune.cli.main import app, main
from gracetune.errors import MachineError
from gracetune.hardware import checks
from gracetune.hardware.allocation import skipped
from gracetune.hardware.checks import Examination
from gracetune.hardware.recording import load_recording

ROOT = Path(__file__).parents[3]
MACHINES = ROOT / "tests" / "fixtures" / "machines"
GOOD: dict[str, Any] = {
    "gracetune": 1,
    "name": "run",
    "output_dir": "out",
    "model": {"family": "sdxl"},
    "datasets": [{"id": "a", "path": "somewhere/else"}],
    "training": {"max_steps": 10},
}


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([str(ROOT), *sys.path]), **variables}
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def write(path: Path, data: Any) -> str:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("script", ["gh200_diagnostic", "validate_uvm"])
def test_the_older_entry_points_claim_the_allocator_string_too(tmp_path: Path, script: str) -> None:
    options = ["--skip-allocation", "--output", str(tmp_path / "report.json")] if script == "gh200_diagnostic" else []
    code = (
        f"import os\nfrom {script} import main\ncode = main({['--json', *options]!r})\n"
        "assert os.environ['PYTORCH_CUDA_ALLOC_CONF'] == 'max_split_size_mb:64', os.environ"
    )
    done = python(code, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64,use_uvm:True")
    assert done.returncode == 0, done.stderr.decode()
    assert b"took use_uvm" in done.stderr
    json.loads(done.stdout)


def test_an_invalid_environment_variable_gives_no_traceback() -> None:
    broken = f"use_uvm:True,uvm_stage1_min_bytes:{'9' * 5000}"
    done = python(
        "", "-m", "gracetune.cli.main", "doctor", "--skip-allocation", "--json", PYTORCH_CUDA_ALLOC_CONF=broken
    )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    uvm = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "uvm")
    assert uvm["remedy"] == "write uvm_stage1_min_bytes:0"


def test_an_error_of_ours_is_a_message_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_session: Session) -> int:
        raise MachineError("no room; make some")

    assert start(fail) == 1
    assert "no room; make some" in capsys.readouterr().err
    assert start(lambda session: 3 if session.environment.get("PATH") else 0) == 3


def test_a_full_disk_is_a_message_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def run(session: Session) -> int:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"a sample")
        return 0

    assert start(run) == 1
    assert "no space left on the disk: make room and run the same command again" in capsys.readouterr().err


def test_a_disk_that_fails_is_a_message_even_if_the_error_names_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    def run(session: Session) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    assert start(run) == 1
    assert "a disk failed: Stale file handle; look at `dmesg`" in capsys.readouterr().err


def test_another_error_of_the_operating_system_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(lambda session: (tmp_path / ("long" * 100)).stat().st_size) == 1
    printed = capsys.readouterr().err
    assert "File name too long (ENAMETOOLONG)" in printed
    assert "try       shorten the name" in printed


@pytest.mark.parametrize(
    "arguments", [["config", "check", "--no-paths"], ["config", "show"], ["config", "show", "--json"]]
)
def test_a_terminal_that_knows_only_ascii(tmp_path: Path, arguments: list[str]) -> None:
    path = write(tmp_path / "é✓.yaml", {**GOOD, "name": "é✓"})
    done = python("", "-m", "gracetune.cli.main", *arguments, path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
    if "--json" in arguments:
        assert json.loads(done.stdout)["config"]["name"] == "é✓"
    if "check" in arguments:
        assert done.stdout.startswith(b"ok ")


def test_a_file_name_that_is_not_valid_text_is_printable(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\n.yaml"
    Path(os.fsdecode(name)).write_text(yaml.safe_dump(GOOD), encoding="utf-8")
    command = [sys.executable, "-m", "gracetune.cli.main", "config"]
    for arguments in (["check", "--no-paths"], ["check", "--no-paths", "--json"], ["show"]):
        done = subprocess.run([*command, *arguments, name], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        if "--json" in arguments:
            assert json.loads(done.stdout)["files"][0]["path"].endswith("\udcff\n.yaml")
        else:
            assert b"\\udcff\\n.yaml" in done.stdout


@pytest.mark.parametrize("value", ['"\\ud800"', '"a\\nb"', '"\\u001b[1m"'])
@pytest.mark.parametrize("flag", ["--json", "--no-paths"])
def test_invalid_text_in_any_value_is_printable(
    tmp_path: Path, value: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("name", "nam", "training"):
        text = "{" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in GOOD.items() if k != key)
        path = write(tmp_path / "run.json", f'{text}, "{key}": {value}}}')
        expected = 0 if (key, flag) == ("name", "--no-paths") and "ud800" not in value else 1
        assert run("config", "check", flag, path) == expected
        text = capsys.readouterr().out
        assert "\x1b" not in text
        text.encode()


@contextmanager
def nobody() -> Iterator[Path]:
    """A folder without permissions, as seen by an unprivileged user: tests may run as root."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        user = os.geteuid()
        if user == 0:
            os.setresuid(65534, 65534, 0)
        try:
            yield Path(folder)
        finally:
            if user == 0:
                os.setresuid(0, 0, 0)


@pytest.mark.parametrize("command", [["check"], ["check", "--json"], ["show"]])
def test_an_unreadable_file_is_a_problem_and_not_a_usage_error(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with nobody() as folder:
        path = Path(write(folder / "run.yaml", GOOD))
        path.chmod(0)
        assert run("config", *command, str(path)) == 1
    streams = capsys.readouterr()
    assert "permission" in (streams.out + streams.err).lower()
    if "--json" in command:
        assert json.loads(streams.out)["files"][0]["problems"][0]["found"] == "Permission denied"


def test_folders_without_permission_are_problems(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody() as folder:
        closed = folder / "closed"
        closed.mkdir()
        path = write(folder / "run.yaml", {**GOOD, "datasets": [{"id": "a", "path": str(closed / "data")}]})
        closed.chmod(0)
        assert run("config", "check", path, str(closed / "file.yaml")) == 1
        closed.chmod(0o755)
    assert capsys.readouterr().out.count("Permission denied") == 2


def test_names_too_long_for_any_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "x" * 300) == 1
    assert "File name too long" in capsys.readouterr().out


def test_a_limit_is_compared_with_what_this_process_may_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = load_recording(MACHINES / "x86-h200-cgroup")
    limit, total = machine.host.memory_limit, machine.host.cpu_mem_total
    assert limit is not None
    assert total is not None
    assert limit < total
    monkeypatch.setattr("gracetune.cli.config.probe", lambda: machine)  # this machine's own limit is anyone's guess
    staged = {"id": "a", "path": str(tmp_path), "type": "in_memory", "in_memory": {"memory_limit_gb": total / 1.1e9}}
    assert run("config", "check", write(tmp_path / "run.yaml", {**GOOD, "datasets": [staged]})) == 0
    assert "is more than the" in capsys.readouterr().out


def test_only_commands_that_exist_are_said_to_work_here() -> None:
    group = typer.main.get_command(app)
    known = set(group.list_commands(typer.Context(group)))  # type: ignore[attr-defined]
    machine = load_recording(MACHINES / "cpu-only")
    finding = checks.gpu(Examination(machine, skipped(1.5, "not here"))).finding
    works = re.findall(r"Available: ([^.]*)\.", finding)[0].partition(" and ")[0]
    assert {word.strip() for word in works.split(",") if word.strip()} <= known


@pytest.mark.parametrize("place", ["/proc/x", "file/x", "n" * 300])
def test_a_demo_needs_a_folder_that_can_be_made(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run("demo", "--output", str(tmp_path / place)) == 1
    assert "choose another one with --output" in capsys.readouterr().err


def test_the_demo_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo itself is tested in tests/runs."""
    (tmp_path / "mine").write_text("keep me")
    assert run("demo", "--output", str(tmp_path)) == 1
    assert "a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "show", "nothing.yaml"], ["estimate", "nothing.yaml"], ["cache", "clear", "nothing.yaml"],
        ["doctor", "--from-recording", "nothing"], ["train", "nothing.yaml"], ["baseline", "compare", "a", "b"],
        ["adapter", "convert", "nothing.safetensors", "-o", "x.safetensors", "--to", "comfyui"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_with_json_an_error_is_one_object_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, "--json") == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["ok"] is False
    assert found["error"]
    assert "nothing" in printed.err or "found" in printed.err
    assert run(*arguments) == 1
    assert capsys.readouterr().out == ""


def test_the_package_runs_as_a_module() -> None:
    done = python("", "-m", "gracetune", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
