"""What the documents name, looked up: commands and their flags, files, config keys, Python names, messages.

Each function gives None where the thing is there, and else what is wrong in words.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import typer

from gracetune.cli.main import app
from gracetune.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("nvidia-smi", "git", "pip", "hf", "df", "ls", "free", "dmesg", "smartctl", "fuser", "export", "pytest")
"""Of other people: only their first word is looked at."""
_TELLING = 8
"""Letters in one piece by which a message can be told from another."""
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FENCE = re.compile(r"^ *```[^\n]*\n.*?^ *```[ ]*$", re.M | re.S)


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def without_fences(text: str) -> str:
    return _FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """The code in a line or a document, without its fenced blocks."""
    return _SPAN.findall(without_fences(text))


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without headings and rules."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.startswith("|") and not line.startswith("|---") and not following.startswith("|---"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            found.append([cell.replace(r"\|", "|").strip() for cell in cells])
    return found


# -- commands ---------------------------------------------------------------------------------------------------------


def command(line: str) -> str | None:
    """A command line: its program, subcommand and flags exist. Words in capitals stand for what the reader fills in."""
    try:
        words = shlex.split(line.replace("'", '"') if line.count("'") % 2 else line)
    except ValueError as error:
        return f"{line}: {error}"
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    if not words:
        return None
    program, rest = words[0], words[1:]
    if program == "gracetune":
        return _ours(line, rest)
    if program in ("python", "source", "bash"):
        return _script(line, rest)
    if program.startswith("scripts/"):
        return _script(line, words)
    if program == "make":
        return None if re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M) else f"{line}: no such target"
    if program == "accelerate":
        return next((problem for word in rest if (problem := _argument(line, word))), None)
    return None if program in PROGRAMS else f"{line}: {program} is no program we know"


def _argument(line: str, word: str) -> str | None:
    is_file = word.endswith((".py", ".yaml", ".json")) and not word.isupper()
    return f"{line}: no file {word}" if is_file and not (ROOT / word).is_file() else None


@cache
def _commands() -> Any:
    return typer.main.get_command(app)


def _ours(line: str, words: list[str]) -> str | None:
    found, names = _commands(), ["gracetune"]
    while hasattr(found, "commands") and words and not words[0].startswith("-"):
        if words[0] not in found.commands:
            return f"{line}: `{' '.join(names)}` has no {words[0]}; it has {', '.join(found.commands)}"
        names.append(words[0])
        found, words = found.commands[words[0]], words[1:]
    if "--" in words:
        words = words[: words.index("--")]
    known = {option for parameter in found.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{line}: `{' '.join(names)}` has no {unknown[0]}" if unknown else None


def _script(line: str, words: list[str]) -> str | None:
    if words[:1] == ["-m"]:
        return None
    path = ROOT / words[0]
    if not path.is_file():
        return f"{line}: no file {words[0]}"
    known = _help(path) if path.name.startswith("test_") else path.read_text()
    if path.name == "train.py":  # takes the flags of `gracetune train`, and SimpleTuner's
        known += "--config"
    flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    unknown = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", known)]
    return f"{line}: {words[0]} has no {unknown[0]}" if unknown else None


@cache
def _help(script: Path) -> str:
    """What a script of ours says about itself: its flags may follow from a list it is given."""
    return subprocess.run(["bash", script, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout


# -- what a name stands for -------------------------------------------------------------------------------------------


def file(path: str) -> str | None:
    return None if (ROOT / path).exists() else f"no file {path}"


def key(name: str) -> str | None:
    """A key of our own configuration; `datasets[].path` is one of every dataset, `datasets[0].path` of the first."""
    schema = _schema()
    location: dict[str, Any] = schema
    for part in re.findall(r"[a-z_][^.\[\]]*", name):
        location = _followed(location, schema)
        if part not in location.get("properties", {}):
            return f"{name}: no key {part}; there are {', '.join(location.get('properties', {}))}"
        location = location["properties"][part]
    return None


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _followed(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Through references, lists and `X or nothing` to the section that has keys."""
    while "properties" not in node:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        elif "items" in node:
            node = node["items"]
        elif "anyOf" in node:
            node = next(option for option in node["anyOf"] if option.get("type") != "null")
        else:
            break
    return node


def python(name: str) -> str | None:
    """A module of ours, or a name in one: `gracetune.gh200.prefetch_to_device`. Found in the source, not imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath("src", *parts[:end])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            lacking = [part for part in parts[end : end + 1] if part not in _top_level(file)]
            return f"{name}: no {lacking[0]} in {file.name}" if lacking else None
    return f"{name}: no such module"


def _top_level(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def imported(name: str) -> object:
    """The same for real, which takes seconds."""
    module, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), last)


def variable(name: str) -> str | None:
    """An environment variable that one of ours reads or writes."""
    if any(name in path.read_text() for path in (ROOT / "scripts").glob("*.sh")):
        return None
    if name.startswith("GH200_") and key(f"memory.{name.removeprefix('GH200_').lower()}") is None:
        return None
    return None if _is_mentioned(re.escape(name), name) else f"{name}: nobody reads this variable"


def statistic(name: str) -> str | None:
    """One of those `gh200.memory_stats()` adds."""
    from gracetune.memory.native import Migrations
    from gracetune.memory.unified_memory import UvmStats, add_uvm_stats

    known = add_uvm_stats({}, UvmStats(migrations=Migrations(0, 0, 0, 0)))
    return None if name in known else f"{name}: not among {', '.join(known)}"


@cache
def _sources() -> dict[Path, str]:
    """The source, with texts that go over several lines put together."""
    paths = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "overlays").rglob("*.py")]
    return {path: re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sorted(paths)}


@cache
def _literals(path: Path) -> tuple[str, ...]:
    """Every text of a file but its documentation. Placeholders stand as `…`."""
    found: list[str] = []
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):  # a statement comes before the text in it
        if isinstance(node, ast.Expr):
            documentation.add(id(node.value))
        if id(node) in documentation:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return tuple(found)


def _is_mentioned(pattern: str, within: str) -> bool:
    """Whether a text of the source has this pattern. Only files that look as if they had `within` are taken apart."""
    compiled = re.compile(pattern, re.S)
    likely = (path for path, text in _sources().items() if within in text)
    return any(compiled.search(literal) for path in likely for literal in _literals(path))


def message(text: str) -> str | None:
    """What we say: its parts between `…` stand in this order in one text of the source."""
    parts = text.split("…")
    longest = max(parts, key=len)
    if len(longest) < _TELLING:
        return f"{text!r} would be found anywhere: quote more of it"
    return None if _is_mentioned(".*?".join(map(re.escape, parts)), longest) else f"nobody says {text!r}"


def result(path: str) -> str | None:
    """A file a command writes: its name is in the source."""
    name = path.rpartition("/")[2]
    return None if _is_mentioned(re.escape(name), name) else f"nobody writes {path}"


def flag(text: str) -> str | None:
    """A flag on its own, `--set training.batch_size=1` with its key: one of our commands has it."""
    name, _, value = text.partition(" ")
    if name == "--set":
        return key(value.partition("=")[0])
    commands, flags = [_commands()], set[str]()
    while commands:
        found = commands.pop()
        commands += getattr(found, "commands", {}).values()
        flags |= {option for parameter in found.params for option in parameter.opts}
    return None if name in flags else f"{name}: no command has this flag"


KINDS = {
    "file": file,
    "command": command,
    "key": key,
    "Python": python,
    "variable": variable,
    "statistic": statistic,
    "message": message,
    "result": result,
    "flag": flag,
}
_NAMED = re.compile(rf"\b({'|'.join(KINDS)}) `([^`\n]+)`")


def named(text: str) -> list[tuple[str, str]]:
    """Every `kind` + code in a text: what it claims to be there."""
    return _NAMED.findall(text)


def problems(text: str) -> list[str]:
    return [problem for kind, name in named(text) if (problem := KINDS[kind](name))]
