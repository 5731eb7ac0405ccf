"""Options in messages exist, and belong to the command that prints the message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from gracetune.cli.main import app
from gracetune.cli.train_flags import _SWITCHES, _VALUES

SOURCE = Path(__file__).parents[3] / "src" / "gracetune"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?![\w(])")
COMMAND = re.compile(r"gracetune ([a-z][a-z-]*(?: [a-z][a-z-]*)?)")
NOT_OURS = re.compile(
    r"benchmarks/|accelerate launch|pip install|docker|container|apptainer|nvidia-smi|hf download|ulimit|ps aux"
    r"|--gpus|--nv\b"
)
"""Other programs, which have their own options."""
NOT_SHOWN = (
    "telemetry/report/style.py",
    "bench/results.py",
    "baselines/machine_probe.py",
    "config/dialects/simpletuner/",
    "hub/access.py",
    "studio/machine_memory.py",
)
"""Style sheets, arguments for other programs (`hf download`, `nvidia-smi`), and SimpleTuner's own command line."""
OF_A_RUN = (
    "adapters", "cache", "checkpoint", "config", "data", "diffusion", "hostmem", "memory", "models", "optim",
    "planning", "storage", "telemetry", "train",
)  # fmt: skip
_CONVERT = "shown by `adapter convert` alone"
_IN_A_COMMAND = "part of a line that begins with `gracetune adapter convert`"
NOT_IN_A_RUN: Mapping[tuple[str, str], str] = {
    ("adapters/verification.py", "--model"): _CONVERT,
    ("adapters/verification.py", "--merge-into"): _CONVERT,
    ("adapters/adapter_files.py", "--alpha"): _CONVERT,
    ("adapters/loading_steps.py", "--for"): _IN_A_COMMAND,
    ("adapters/loading_steps.py", "--lora-rank"): _IN_A_COMMAND,
    ("adapters/loading_steps.py", "--model"): _IN_A_COMMAND,
    ("adapters/svd.py", "--merge-into"): _CONVERT,
    ("adapters/svd.py", "--to"): _CONVERT,
    ("adapters/svd.py", "--lora-rank"): _CONVERT,
    ("adapters/formats/writing.py", "--lora-rank"): "a run has a hint of its own: `check_format`",
    ("adapters/formats/writing.py", "--merge-into"): "a run has a hint of its own: `check_format`",
    ("adapters/formats/programs.py", "--to"): "a run has hints of its own: `reject_misread_files`",
    ("adapters/formats/programs.py", "--for"): "a run has hints of its own: `reject_misread_files`",
    ("adapters/formats/programs.py", "--lora-rank"): "a run has hints of its own: `reject_misread_files`",
    ("adapters/formats/programs.py", "--merge-into"): "a run has hints of its own: `reject_misread_files`",
    ("adapters/formats/comfyui.py", "--model"): "a run measures the magnitudes by its base model",
    ("adapters/formats/detection.py", "--family"): "a run knows the family",
    ("config/machine_checks.py", "--no-paths"): "`train` and `cache` take it out",
    ("memory/validate.py", "--device"): "an option of validate_uvm.py",
    ("models/registry.py", "--flavour"): "shown by `adapter verify` alone",
    ("train/judging.py", "--most"): "shown by `data judge` alone",
    ("train/runtime.py", "--num_processes"): "an option of `accelerate launch`, which the hint names",
}


def commands(group: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command and its options."""
    if hasattr(group, "commands"):
        for word, one in group.commands.items():
            yield from commands(one, f"{name} {word}".strip())
    else:
        names = (name for one in group.params for name in (*one.opts, *one.secondary_opts))
        yield name, {option for option in names if option.startswith("--")} | {"--help"}


OURS = dict(commands(typer.main.get_command(app)))
ALL = set().union(*OURS.values()) | {"--device", "--config", "--version", "--num_processes"}
"""All options, including those of the scripts at the root and of accelerate."""


def texts() -> Iterator[tuple[str, int, str]]:
    """All text in our code that may be printed: file, line, text. The parts of one message are joined."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith(NOT_SHOWN):
            continue
        tree = ast.parse(path.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        explained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inside | explained:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "X" for one in node.values)
                yield name, node.lineno, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield name, node.lineno, node.value


NAMED = [(name, line, text) for name, line, text in texts() if OPTION.search(text) and not NOT_OURS.search(text)]


def named_options() -> Iterator[tuple[str, str, str]]:
    """Location, option, and the text that names it."""
    for name, line, text in NAMED:
        yield from ((f"{name}:{line}", found, text) for found in OPTION.findall(text))


def test_every_option_in_a_message_exists() -> None:
    unknown = [f"{location}: {found}" for location, found, _ in named_options() if found not in ALL]
    assert not unknown, "\n".join(unknown)
    assert len(NAMED) > 100, "the messages are not where they are looked for"


def test_commands_in_messages_have_the_options_named_with_them() -> None:
    wrong: list[str] = []
    for name, line, text in NAMED:
        for found in COMMAND.finditer(text):
            command = next((one for one in (found[1], found[1].partition(" ")[0]) if one in OURS), None)
            rest = OPTION.findall(re.split(r"[;`\n]|, |\. ", text[found.end() :])[0])
            if command is not None:
                wrong += [f"{name}:{line}: {one} of {command}" for one in rest if one not in OURS[command]]
    assert not wrong, "\n".join(wrong)


def test_messages_of_a_run_name_options_of_train() -> None:
    """A message may name options of another command if it names that command."""
    wrong = [
        f"{location}: {found}: {text[:90]!r}"
        for location, found, text in named_options()
        if location.startswith(OF_A_RUN) and not COMMAND.search(text)
        if found not in OURS["train"] and (location.partition(":")[0], found) not in NOT_IN_A_RUN
    ]
    assert not wrong, "\n".join(wrong)


def test_train_py_has_the_options_of_train() -> None:
    """Messages that name an option are then correct for both."""
    assert {f"--{name}" for name in (*_SWITCHES, *_VALUES)} - {"--config"} == OURS["train"] - {"--help"}


@pytest.mark.parametrize("key", [*NOT_IN_A_RUN], ids=" ".join)
def test_exceptions_are_still_needed(key: tuple[str, str]) -> None:
    assert any((location.partition(":")[0], found) == key for location, found, _ in named_options())
