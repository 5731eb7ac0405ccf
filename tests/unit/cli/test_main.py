"""The list of commands is quick and complete, and usage errors suggest what to type."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command

from gracetune import __version__
from gracetune.cli.console import out, print_error, print_problems
from gracetune.cli.main import ENTRIES, MEANT, app
from gracetune.errors import GracetuneError, Problem
from runs.test_commands import gracetune
from unit.cli.test_options_in_messages import OURS as COMMANDS


@pytest.mark.parametrize("name", ENTRIES)
def test_the_list_has_the_first_line_of_each_command_s_help(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    assert (command.help or "").startswith(ENTRIES[name].help.removesuffix("."))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_configs(option: str) -> None:
    """They print within half a second. Imports are counted, because times are unreliable on a busy machine."""
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
def test_an_unknown_command_suggests_the_intended_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meant.split()[0] in ENTRIES
    assert gracetune(typed, "photos.yaml") == 2
    assert f"Try: gracetune {meant}" in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.parametrize(("typed", "meant"), [("config chek", "config check"), ("adapter nothing", "adapter --help")])
def test_a_group_suggests_its_own_commands(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune(*typed.split()) == 2
    assert f"Try: gracetune {meant}" in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_a_path_without_a_command_suggests_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my photos").mkdir()
    (tmp_path / "run.yaml").touch()
    for typed, meant in (("my photos", "init 'my photos'"), ("run.yaml", "train run.yaml")):
        assert gracetune(typed) == 2
        assert f"Try: gracetune {meant}" in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_whole_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With little room, rich shortens an option's name and ends it in an ellipsis."""
    monkeypatch.setenv("COLUMNS", "80")
    assert gracetune(*command.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "<bool>" not in shown
    assert "--install-completion" not in shown  # typer's, which changes the shell's files; ours prints a script
    assert COMMANDS[command] <= set(re.findall(r"--[a-z-]+", shown))


@pytest.mark.parametrize("arguments", [["start"], ["train"], ["train", "--nothing", "a.yaml"], ["--nothing"]])
def test_usage_errors_as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune(*arguments, "--json") == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"] is False
    assert json.loads(printed.out)["error"]
    assert "Error" in printed.err
    assert gracetune(*arguments) == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [
        ("--steps", "(Possible options: --max-steps)"),
        ("--dryrun", "(Possible options: --dry-run)"),
        ("--lr", "(Possible options: --set optimizer.lr=VALUE)"),
        ("--batch-size", "(Possible options: --set training.batch_size=VALUE)"),
        ("--qqq", ""),
    ],
)
def test_an_unknown_option_suggests_what_was_meant(
    option: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gracetune("train", "run.yaml", option, "1", "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"] == f"No such option: {option} {suggestion}".rstrip()


def test_problems_are_wrapped_between_words_on_a_terminal_only() -> None:
    long = Problem(
        "model", "nothing", "a folder or an id of the hub, such as owner/name", "add `model: {path: ./sdxl}`"
    )
    wide, narrow = (
        Console(file=StringIO(), width=40, soft_wrap=True, force_terminal=terminal) for terminal in (False, True)
    )
    for console in (wide, narrow):
        print_problems(console, (long,))
    assert "    expected  a folder or an id of the hub, such as owner/name\n" in printed(wide)
    lines = printed(narrow).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[2:4] == ["    expected  a folder or an id of the", "              hub, such as owner/name"]


def test_an_error_is_wrapped_under_its_label(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    print_error(GracetuneError("unreadable files\n  try       repair or remove the files below\n    a.png: damaged"))
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err).splitlines()
    assert lines == [
        "error unreadable files",
        "  try       repair or remove the files",
        "            below",
        "    a.png: damaged",
    ]


def test_paragraphs_of_a_help_text_have_no_line_breaks_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert gracetune("report", "--help") == 0
    assert (
        "losses, speed, memory) and report.json (the same as data) in the run's folder are" in capsys.readouterr().out
    )


def test_output_is_wrapped_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/folder/whose/path/is/longer/than/the/terminal"
    text = f"[bold]samples[/]  a grid of all samples, in {path} and more"
    monkeypatch.setenv("COLUMNS", "30")
    out().print(text)
    assert capsys.readouterr().out == f"samples  a grid of all samples, in {path} and more\n"
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    out().print(text)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert lines == ["samples  a grid of all", "samples, in", path, "and more"]


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
