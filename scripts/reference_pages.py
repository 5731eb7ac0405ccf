"""Generates the reference pages: docs/options.md from the config schema, docs/commands.md from the commands.

python scripts/reference_pages.py          # write both
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gracetune.cli.main import app
from gracetune.config.dataset_config import BACKEND_SECTIONS
from gracetune.config.pydantic_errors import expectation
from gracetune.config.run_config import RunConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
OPTIONS = """# Options

Every option of gracetune's own dialect, with its default; – means that the option is unset. Dialects, `--set` and what
is rejected: [configuration](configuration.md). `gracetune config show FILE` prints the values of a file and where each
comes from; `gracetune config schema` prints this page as a JSON Schema, for editors.

Generated from the config schema by `scripts/reference_pages.py`; a test compares them.
"""
COMMANDS = """# Commands

Every command with its arguments and options, as `--help` prints them. Exit codes: 0 success, 1 an error, 2 wrong usage,
3 interrupted (a run is saved; the same command resumes it), 141 a closed pipe. With `--json` a command prints one JSON
object on stdout and nothing else there; an error is one object too, with `ok`, `error` and `problems`.

`torchrun` and `accelerate launch` start a run with several processes: [several GPUs and clusters](cluster.md).
`python train.py --config CONFIG` is `gracetune train CONFIG` and takes SimpleTuner's flags too,
`python gh200_diagnostic.py` is `gracetune doctor`, and `python validate_uvm.py` tests what the memory layer relies on.

Generated from the commands by `scripts/reference_pages.py`; a test compares them.
"""


def options_page() -> str:
    lines = [OPTIONS, "## The file\n", *_table(RunConfig, ()), ""]
    for path, section, description in _sections(RunConfig, ()):
        lines += [f"{'#' * min(4, 1 + len([part for part in path if part != 0]))} {_written(path)}\n"]
        lines += [f"{_one_line(description)}\n"] if description else []
        lines += [*_table(section, path), ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections(
    section: type[BaseModel], prefix: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], type[BaseModel], str]]:
    """Every section below this one: its path, its class, and what it is for."""
    for name, field in section.model_fields.items():
        inner = _inner(field)
        if inner is not None:
            path = (*prefix, name, 0) if get_origin(field.annotation) is tuple else (*prefix, name)
            yield path, inner, field.description or inner.__doc__ or ""
            yield from _sections(inner, path)


def _inner(field: FieldInfo) -> type[BaseModel] | None:
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _table(section: type[BaseModel], prefix: tuple[str | int, ...]) -> Iterator[str]:
    """The options of one section; sections inside it have tables of their own."""
    fields = {name: field for name, field in section.model_fields.items() if name not in BACKEND_SECTIONS}
    yield "| option | values | default | |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        if _inner(field) is not None:
            heading = _written((*prefix, name, 0) if get_origin(field.annotation) is tuple else (*prefix, name))
            anchor = "".join(sign for sign in heading if sign.isalnum() or sign in "_-")
            yield f"| [`{name}`](#{anchor}) | section | | {_cell(field.description or '')} |"
        else:
            values = _cell(expectation((*prefix, name)))
            yield f"| `{name}` | {values} | {_default(field)} | {_cell(field.description or '')} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "–" if value is None else f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _written(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path).replace(".0", "[]")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", r"\|")


def commands_page() -> str:
    group = typer.main.get_command(app)
    lines = [COMMANDS, "| command | |", "|---|---|"]
    found = [*_commands(group, ("gracetune",))]
    lines += [f"| [`{' '.join(names)}`](#{'-'.join(names)}) | {_cell(_help(one))} |" for names, one in found]
    before: dict[str, tuple[str, ...]] = {}
    for names, one in found:
        arguments = [parameter for parameter in one.params if not parameter.opts[0].startswith("-")]
        written = [_argument(argument) for argument in arguments]
        lines += ["", f"## {' '.join(names)}", "", _one_line(_help(one))]
        listed = [f"- {name}: {_one_line(about.help)}" for name, about in zip(written, arguments, strict=True)]
        lines += ["", *listed] if listed else []
        rows = [_option(option) for option in one.params if option not in arguments]
        same = next((name for name, others in before.items() if others == tuple(rows) and len(rows) > 3), None)
        if same is not None:
            lines += ["", f"The options are those of `{same}`."]
        elif rows:
            lines += ["", "| option | default | |", "|---|---|---|", *rows]
        before.setdefault(" ".join(names), tuple(rows))
    return "\n".join(lines) + "\n"


def _commands(command: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name in command.list_commands(None):
        yield from _commands(command.commands[name], (*names, name))


def _help(command: Any) -> str:
    return str(command.help or "")


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return f"`{name}`" if argument.required or name.startswith("[") else f"`[{name}]`"


def _option(option: Any) -> str:
    value = default = ""
    if not option.is_flag:
        value = " " + (option.metavar or r"\|".join(get_args(option.type_descriptor.annotation)))
        default = "" if option.default is None else f"`{option.default}`"
    return f"| `{', '.join(option.opts)}{value}` | {default} | {_cell(option.help or '')} |"


def main() -> None:
    (DOCS / "commands.md").write_text(commands_page())
    (DOCS / "options.md").write_text(options_page())


if __name__ == "__main__":
    main()
