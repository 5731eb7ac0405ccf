from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def decide(machine: Path, login: dict[str, str]) -> Callable[[], list[str]]:
    """Ask the machine's own Python, as bootstrap.sh does."""

    def ask() -> list[str]:
        command = [machine / "bin" / "python", ROOT / "scripts" / "pick_torch.py", "decide"]
        done = subprocess.run(command, env=login, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return ask


class TestDecide:
    @pytest.mark.parametrize(
        "version", ["2.11.0", "2.11.0+cu130", "2.11.0a0+vendor.25.12", "2.12.0.dev20260101", "3.0"]
    )
    def test_reuses_a_cuda_build_that_is_new_enough(
        self, version, decide, machine, put_distribution, torch_files
    ) -> None:
        put_distribution(machine, "torch", version, torch_files(version, "13.0"))
        decision, reason, *pth_lines = decide()
        assert (decision, reason) == ("reuse", f"torch {version} with CUDA 13.0 is already here")
        assert len(pth_lines) == 1
        assert str(machine) in pth_lines[0]

    @pytest.mark.parametrize(
        ("version", "cuda", "reason"),
        [
            ("2.13.0+cpu", None, "the torch here (2.13.0+cpu) has no CUDA"),
            ("2.10.1", "12.8", "the torch here (2.10.1) is older than 2.11.0"),
            ("2.9.0a0+vendor.25.9", "13.0", "the torch here (2.9.0a0+vendor.25.9) is older than 2.11.0"),
        ],
    )
    def test_installs_otherwise(self, version, cuda, reason, decide, machine, put_distribution, torch_files) -> None:
        put_distribution(machine, "torch", version, torch_files(version, cuda))
        assert decide() == ["install", reason]

    def test_installs_where_there_is_none(self, decide) -> None:
        assert decide() == ["install", "no torch here"]

    @pytest.mark.parametrize("failure", ["import libcudart_missing", "raise OSError('libcudart.so.13:\\nnot found')"])
    def test_a_build_that_does_not_import_is_not_kept(self, failure, decide, machine, put_distribution) -> None:
        put_distribution(machine, "torch", "2.11.0", {"torch/__init__.py": failure})
        decision, reason = decide()
        assert decision == "install"
        assert reason.startswith("the torch here does not import (")
        assert "libcudart" in reason

    def test_a_build_pip_cannot_see_is_not_kept(self, decide, machine, put_distribution, torch_files) -> None:
        put_distribution(machine, "nottorch", "1.0", torch_files("2.11.0", "13.0"))
        decision, reason = decide()
        assert decision == "install"
        assert "no package metadata" in reason


class TestAdapt:
    PINS = "# a comment\n\ntorch==2.13.0\npillow==13.0.0\nMarkup_Safe==3.0.4\nxxhash==4.1.0\n"
    BOUNDS = {"torch": "2.11.0.dev0", "pillow": "13.0"}  # noqa: RUF012

    def test_changes_nothing_on_a_bare_machine(self, pick_torch: ModuleType) -> None:
        expected = ["torch==2.13.0", "pillow==13.0.0", "Markup_Safe==3.0.4", "xxhash==4.1.0"]
        assert pick_torch.adapt(self.PINS, self.BOUNDS, {"unrelated": "1"}) == expected

    def test_pins_torch_to_what_is_there(self, pick_torch: ModuleType) -> None:
        adapted = pick_torch.adapt(self.PINS, self.BOUNDS, {"torch": "2.11.0a0+vendor.25.12"})
        assert adapted[0] == "torch==2.11.0a0+vendor.25.12"

    def test_leaves_companions_alone_unless_too_old(self, pick_torch: ModuleType) -> None:
        assert "pillow==13.0.0" in pick_torch.adapt(self.PINS, self.BOUNDS, {"pillow": "12.9"})
        assert "pillow==13.0.0" not in pick_torch.adapt(self.PINS, self.BOUNDS, {"pillow": "13.1"})
        assert "Markup_Safe==3.0.4" not in pick_torch.adapt(self.PINS, self.BOUNDS, {"markup-safe": "2.0"})


@pytest.mark.parametrize(
    ("version", "bound", "enough"),
    [
        ("2.11", "2.11.0", True),
        ("2.11.0", "2.11", True),
        ("2.11.0a0+git1", "2.11.0.dev0", True),
        ("2.9.1", "2.11", False),
        ("10.0", "9.9.9", True),
        ("unknown", "0.1", False),
    ],
)
def test_versions_compare_by_number(pick_torch: ModuleType, version: str, bound: str, enough: bool) -> None:
    assert pick_torch.at_least(version, bound) is enough


def test_bounds_come_from_pyproject(pick_torch: ModuleType, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        "[project]\ndependencies = ['torch>=2.11.0.dev0', 'Lycoris_Lora>=4.1,<5']\n"
        "[project.optional-dependencies]\ndev = [\"mypy[x]>=2.4; sys_platform == 'linux'\"]\n"
    )
    assert pick_torch.lower_bounds(project) == {"torch": "2.11.0.dev0", "lycoris-lora": "4.1", "mypy": "2.4"}
    project.write_text("[project]\ndependencies = ['torch==2.13.0']\n")
    with pytest.raises(SystemExit, match=r"found requirement 'torch==2.13.0', expected name>=version"):
        pick_torch.lower_bounds(project)
