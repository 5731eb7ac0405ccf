"""The list of commands: quick, complete, and helpful about what was typed wrongly."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.main import get_command

from gracetune import __version__
from gracetune.cli.main import ENTRIES, MEANT, app
from runs.test_commands import gracetune


@pytest.mark.parametrize("name", ENTRIES)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    assert (command.help or "").startswith(ENTRIES[name].help.removesuffix("."))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_configs(option: str) -> None:
    """They print within half a second. A busy machine makes time a bad witness, so imports are counted."""
    code = f"""
import sys
from gracetune.cli.main import main
try:
    main(["{option}"])
finally:
    print([name for name in ("torch", "numpy", "yaml", "gracetune.config") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert (__version__ if option == "--version" else "validate-now") in done.stdout


@pytest.mark.parametrize(("typed", "meant"), [*MEANT.items(), ("trian", "train"), ("estimat", "estimate")])
def test_an_unknown_command_names_the_one_that_is_meant(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meant.split()[0] in ENTRIES
    assert gracetune(typed, "photos.yaml") == 2
    assert f"Try: gracetune {meant}" in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.parametrize("arguments", [["start"], ["train"], ["train", "--nothing", "a.yaml"], ["--nothing"]])
def test_usage_errors_as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune(*arguments, "--json") == 2
    message = capsys.readouterr()
    assert json.loads(message.out)["ok"] is False
    assert json.loads(message.out)["error"]
    assert "Error" in message.err
    assert gracetune(*arguments) == 2
    assert not capsys.readouterr().out
