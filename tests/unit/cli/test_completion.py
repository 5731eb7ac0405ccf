"""Completion scripts know every command and option, and complete what is typed."""

from __future__ import annotations

import contextlib
import os
import pty
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


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


typed_and_completed = pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("zsh", marks=needs("zsh")), pytest.param("fish", marks=needs("fish"))]
)
def test_the_shell_parses_the_script(shell: str, scripts: dict[str, Path]) -> None:
    subprocess.run([shell, "-n", scripts[shell]], check=True)


@typed_and_completed
def test_bash_completes(typed: str, completed: str, scripts: dict[str, Path]) -> None:
    """Where nothing is suggested, bash completes files."""
    words = " ".join(f"'{word}'" for word in ("gracetune", *typed.split(" ")))
    code = f"source {scripts['bash']}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _gracetune"
    done = subprocess.run(
        ["bash", "-c", f'{code}; echo "${{COMPREPLY[*]}}"'], capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (completed, "")


@needs("fish")
@typed_and_completed
def test_fish_completes(typed: str, completed: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "photos.yaml").touch()
    code = f"source {scripts['fish']}; complete -C 'gracetune {typed}'"
    done = subprocess.run(["fish", "--no-config", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    candidates = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert (candidates, done.stderr) == (completed.split() or ["photos.yaml"], "")


ZSHRC = """
fpath+=$ZDOTDIR
autoload -Uz compinit; compinit -u -D
compadd() {  # what completion functions offer; a call with -O, -A or -D only computes
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
    local -a offered
    builtin compadd -A offered "$@"
    print -rl -- $offered >> $OFFERED
    builtin compadd "$@"
}
zle-line-init() { BUFFER=$TYPED; CURSOR=$#BUFFER; zle complete-word; exit 0 }
zle -N zle-line-init
"""
"""An interactive zsh that presses Tab once at its first prompt."""


@needs("zsh")
@typed_and_completed
def test_zsh_completes(typed: str, completed: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    """The script is where its first lines say: in a file `_gracetune` of a folder in fpath."""
    home, folder, offered = tmp_path / "home", tmp_path / "folder", tmp_path / "offered"
    home.mkdir()
    folder.mkdir()
    (folder / "photos.yaml").touch()
    (home / ".zshrc").write_text(ZSHRC)
    shutil.copy(scripts["zsh"], home / "_gracetune")
    keyboard, terminal = pty.openpty()
    variables = {"ZDOTDIR": str(home), "OFFERED": str(offered), "TYPED": f"gracetune {typed}", "TERM": "xterm"}
    with subprocess.Popen(
        ["zsh", "-i"], cwd=folder, env=os.environ | variables, stdin=terminal, stdout=terminal, stderr=terminal
    ) as shell:
        os.close(terminal)
        printed = read_all(keyboard)
        assert shell.wait(timeout=30) == 0, printed
    assert offered.read_text().split() == (completed.split() or ["photos.yaml"]), printed


def read_all(terminal: int) -> bytes:
    """What is printed until the other end closes, which Linux reports as an error."""
    printed = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 4096):
            printed += part
    os.close(terminal)
    return printed
