"""Every command of scripts/gpu_session.sh is one that its program understands, with and without SMOKE.

The time on a lent GPU is short. A command with a misspelt option or a benchmark that ends while it reads its options
would waste it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer

from gracetune.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
SESSION = ROOT / "scripts" / "gpu_session.sh"
STEPS = re.findall(r"^#   ([a-z]+) {2,}", SESSION.read_text(), re.MULTILINE)
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))

RECORDING_PYTHON = """#!/usr/bin/env bash
case "$2" in
    *runpy*) shift 2; printf '%s\\0' "$@" >"$RECORDED/$$" ;; # a file each: some steps start several at once
    *) cat >/dev/null ;;
esac
"""
"""Stands in for Python: writes down the programs that the session starts, and starts none."""


class OptionsRead(Exception):  # noqa: N818 - not an error: how far a program is run
    pass


@pytest.fixture
def read_only_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark ends as soon as it has read its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise OptionsRead

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    place = importlib.util.spec_from_file_location(f"benchmark_{name[:-3]}", ROOT / "benchmarks" / name)
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # its dataclasses look themselves up there
    place.loader.exec_module(module)
    return module


def understood_by_benchmark(name: str, options: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(OptionsRead):
        module.main()


def understood_by_gracetune(arguments: Sequence[str]) -> None:
    """Parse as the command line does, down to the last group, without running the command."""
    command, rest = typer.main.get_command(app), [*arguments]
    context = click.Context(command)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, name
        command = found
    command.make_context(arguments[-1], rest, parent=context)


@pytest.mark.usefixtures("read_only_options")
@pytest.mark.parametrize("smoke", ["", "1"], ids=["real", "smoke"])
@pytest.mark.parametrize("step", STEPS)
def test_commands_of_a_step_are_understood(
    step: str, smoke: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, recorded = tmp_path / "python", tmp_path / "recorded"
    recorded.mkdir()
    python.write_text(RECORDING_PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "RECORDED": str(recorded), "SMOKE": smoke}
    subprocess.run(["bash", SESSION, step, tmp_path / "out"], env=environment, timeout=60, check=True)
    commands = [file.read_text().removesuffix("\0").split("\0") for file in recorded.iterdir()]
    assert commands
    for program, *arguments in commands:
        if program == "pytest":
            assert arguments[0] == "tests/gpu"
            assert (ROOT / arguments[0]).is_dir()
        elif program == "gracetune.cli.main":
            understood_by_gracetune(arguments)
        else:
            understood_by_benchmark(Path(program).name, arguments, monkeypatch)


@pytest.mark.usefixtures("read_only_options")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_reads_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    understood_by_benchmark(name, [], monkeypatch)
