"""Completion scripts know every command and option, and complete what is typed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gracetune.cli.main import ENTRIES
from runs.test_commands import gracetune
from unit.cli.test_options_in_messages import OURS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as file:
            patch.setattr("sys.stdout", file)
            assert gracetune("completion", shell) == 0
        found[shell] = folder / shell
    return found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_the_script(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text()
    assert all(name in text for name in ENTRIES)
    for option in {option for options in OURS.values() for option in options}:
        assert (f"-l {option[2:]} " if shell == "fish" else option) in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_accepts_the_script(shell: str, scripts: dict[str, Path]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", scripts[shell]], check=True)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tr", "train"),
        ("train --dr", "--dry-run"),
        ("train run.yaml --log-level ", "debug info warning"),
        ("config ch", "check"),
        ("adapter convert a.safetensors --to d", "diffusers"),
        ("train ", ""),
        ("train --set ", ""),
    ],
)
def test_bash_completes(typed: str, completed: str, scripts: dict[str, Path]) -> None:
    """Where nothing is suggested, bash completes files."""
    words = " ".join(f"'{word}'" for word in ("gracetune", *typed.split(" ")))
    code = f"source {scripts['bash']}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _gracetune"
    done = subprocess.run(
        ["bash", "-c", f'{code}; echo "${{COMPREPLY[*]}}"'], capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (completed, "")
