from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from gracetune.cli.doctor import DoctorOptions, doctor, examine, run_doctor, uvm_report, write_report
from gracetune.config.environment import Environment
from gracetune.errors import ConfigError, GracetuneError
from gracetune.hardware.machine import Machine
from gracetune.hardware.recording import load_recording
from unit.hardware.machines import MACHINES, NAMES, FakeCuda, load

ROOT = Path(__file__).parents[3]
app = typer.Typer()
app.command()(doctor)


def call(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def report(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_report_of_every_modelled_machine(name: str) -> None:
    found = report("--from-recording", str(MACHINES / name))
    machine = load(name)
    assert (found["format"], found["profile"], found["reason"]) == (1, machine.profile.value, machine.profile.reason)
    assert all(set(check) == {"name", "status", "finding", "remedy"} for check in found["checks"])
    assert Machine.model_validate(found["machine"]) == machine
    assert set(found["uvm"]) == {"enabled", "raw", "oversubscription_ratio", "access_pattern"}
    assert set(found["system"]) == {
        *("architecture", "kernel", "cpu_count", "total_ram_gb", "available_ram_gb"),
        *("gpu_name", "gpu_memory_gb", "cuda_version", "driver"),
    }
    assert found["torch_version"] == machine.software.torch
    test = found["uvm_allocation_test"]
    assert (test["status"], test["allocated_gb"], test["error"]) == ("skipped", None, None)
    assert "recording" in test["reason"]


def test_the_older_fields_carry_values() -> None:
    found = report("--from-recording", str(MACHINES / "gh200-numa"))
    assert found["system"] == {
        "architecture": "aarch64",
        "kernel": "6.8.0-1013-nvidia-64k",
        "cpu_count": 72,
        "total_ram_gb": 573.8,
        "available_ram_gb": 564.5,
        "gpu_name": "NVIDIA GH200 480GB",
        "gpu_memory_gb": 95.0,
        "cuda_version": "13.0",
        "driver": "580.65.06",
    }


def test_the_machine_in_a_report_is_a_machine() -> None:
    result = call("--from-recording", str(MACHINES / "gb200"), "--json")
    text = json.dumps(json.loads(result.stdout)["machine"])
    assert Machine.model_validate_json(text) == load("gb200")


@pytest.mark.parametrize("columns", [80, 120, 40])
@pytest.mark.parametrize("name", NAMES)
def test_people_can_read_it_at_any_width(name: str, columns: int) -> None:
    result = call("--from-recording", str(MACHINES / name), columns=columns)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert result.stdout.isascii()
    assert lines[0].startswith("profile")
    assert lines[-1].startswith("READY")
    assert [line for line in lines if line != line.rstrip()] == []
    if columns >= 80:
        assert [line for line in lines if len(line) > columns] == []


def test_exit_codes() -> None:
    tree = str(MACHINES / "cpu-only")
    assert call("--from-recording", tree).exit_code == 0
    assert call("--from-recording", tree, "--require-gpu").exit_code == 1
    assert call("--from-recording", tree, "--require-gpu").stdout.splitlines()[-1].startswith("NOT READY")
    assert call("--from-recording", str(MACHINES / "gb10"), "--require-gpu").exit_code == 0


def test_two_gpus_have_a_line_each() -> None:
    lines = call("--from-recording", str(MACHINES / "gb200"), columns=120).stdout.splitlines()
    assert [line[:5] for line in lines if line.startswith("gpu ")] == ["gpu 0", "gpu 1"]


def test_output_is_complete_and_readable_by_others(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    result = call("--from-recording", str(MACHINES / "gh200-numa"), "--output", str(target))
    assert result.exit_code == 0
    assert json.loads(target.read_text())["profile"] == "superchip"
    assert "Report written to" in result.stderr
    assert target.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_write_keeps_the_old_report_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.mkdir()
    with pytest.raises(ConfigError, match="--output"):
        write_report(target, {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(ConfigError, match="--output"):
        write_report(tmp_path / "no" / "such" / "folder.json", {})


@pytest.mark.parametrize(
    "arguments",
    [
        ("--from-recording", "nowhere"),
        ("--oversubscription-scale", "nan"),
        ("--oversubscription-scale", "-1"),
        ("--record", "a", "--from-recording", "b"),
        ("--from-recording", str(MACHINES / "gb10"), "--output", str(MACHINES)),
    ],
)
def test_bad_input_is_an_error_of_ours(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, GracetuneError)
    assert result.stdout == ""


def test_json_is_alone_on_stdout_even_when_recording(tmp_path: Path) -> None:
    result = call(
        "--json", "--skip-allocation", "--record", str(tmp_path / "mine"), "--output", str(tmp_path / "r.json")
    )
    assert json.loads(result.stdout)["format"] == 1
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(result.stdout)
    assert load_recording(tmp_path / "mine").host.architecture
    assert "Recording written to" in result.stderr


ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first",
}


def test_the_environment_is_reported() -> None:
    found = uvm_report(Environment(ENVIRONMENT))
    assert (found.enabled, found.oversubscription_ratio, found.access_pattern) == (True, 5.0, "gpu_first")
    assert found.raw == ENVIRONMENT["PYTORCH_CUDA_ALLOC_CONF"]
    assert found.problems == ()
    broken = uvm_report(Environment({"GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0x"}))
    assert len(broken.problems) == 1
    assert broken.problems[0].key == "GH200_UVM_OVERSUBSCRIPTION_RATIO"


def test_settings_of_this_machine_do_not_count_for_a_recorded_one() -> None:
    recorded = examine(DoctorOptions(from_recording=MACHINES / "gh200-numa"), Environment(ENVIRONMENT))
    assert [check.name for check in recorded.checks if check.name.startswith("uvm")] == []
    current = examine(DoctorOptions(skip_allocation=True), Environment(ENVIRONMENT))
    assert [check.name for check in current.checks if check.name.startswith("uvm")] == ["uvm", "uvm_policy"]


def test_problems_in_the_environment_fail_the_examination() -> None:
    current = examine(DoctorOptions(skip_allocation=True), Environment({"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:true"}))
    assert "uvm" in [check.name for check in current.checks if check.status == "fail"]
    assert not current.healthy


def test_skipping_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor(DoctorOptions(skip_allocation=True, json=True), Environment({}))
    test = json.loads(capsys.readouterr().out)["uvm_allocation_test"]
    assert (test["status"], test["reason"], test["requested_scale"]) == ("skipped", "--skip-allocation", 1.5)


def test_the_older_entry_point_writes_its_report(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "gh200_diagnostic.py"), "--oversubscription-scale", "1.5"]
    run = subprocess.run([*command, "--skip-allocation", "--json"], cwd=tmp_path, capture_output=True, text=True)
    written = json.loads((tmp_path / "gh200_diagnostic_report.json").read_text())
    assert run.returncode == any(check["status"] == "fail" for check in written["checks"]), run.stderr
    assert json.loads(run.stdout) == written
    assert {"uvm", "system", "torch_version", "uvm_allocation_test", "checks", "profile", "reason"} <= set(written)


def test_the_older_entry_point_rejects_nonsense_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "gh200_diagnostic.py"), "--oversubscription-scale", "nan"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert "--oversubscription-scale" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_a_driver_runs_the_test_and_reports_it(
    fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complete command in a separate process, where libcuda.so.1 is the fake library."""
    (tmp_path / "libcuda.so.1").symlink_to(fake_cuda.path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    command = [sys.executable, str(ROOT / "gh200_diagnostic.py"), "--oversubscription-scale", "0.01"]
    run = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert found["machine"]["gpus"][0]["name"] == "Fake GPU"
    test = found["uvm_allocation_test"]
    assert (test["status"], test["allocated_gb"]) == ("success", 0.08)
    assert test["fill_bandwidth_gbps"] > 0
    # The fake GPU sits in a machine whose torch has no CUDA: exactly what this check is for.
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert statuses["allocation"] == "ok"
    assert run.returncode == (1 if "fail" in statuses.values() else 0)


@pytest.mark.parametrize("place", ["folder", "missing/report.json", "file/report.json", "x" * 300])
def test_a_report_that_cannot_be_written_is_rejected_before_the_examination(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    never = DoctorOptions(output=Path(place), scale=-1)  # the examination itself would complain about the scale
    with pytest.raises(ConfigError) as caught:
        run_doctor(never, Environment({}))
    assert caught.value.problems[0].key == "--output"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
