"""Generates the reference pages: docs/options.md from the config schema, docs/commands.md from the commands.

python scripts/reference_pages.py          # write both
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer.main
from pydantic.fields import FieldInfo

from gracetune.cli.main import app
from gracetune.config.option_listing import OptionSection, default_of, one_line, option_sections, section_of
from gracetune.config.pydantic_errors import expectation

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
    lines = [OPTIONS]
    for section in option_sections():
        depth = min(4, 1 + len([part for part in section.path if part != 0]))
        lines += [f"{'#' * depth} {section.written}\n" if section.path else "## The file\n"]
        lines += [f"{section.description}\n"] if section.description else []
        lines += [*_table(section), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(section: OptionSection) -> Iterator[str]:
    """The options of one section; sections inside it have tables of their own."""
    yield "| option | values | default | |"
    yield "|---|---|---|---|"
    for path, field in section.fields():
        inner = section_of(field)
        if inner is not None:
            heading = OptionSection(path, inner, "").written
            anchor = "".join(sign for sign in heading if sign.isalnum() or sign in "_-")
            name = next(str(part) for part in reversed(path) if part != 0)
            yield f"| [`{name}`](#{anchor}) | section | | {_cell(field.description or '')} |"
        else:
            values, about = _cell(expectation(path)), _cell(field.description or "")
            yield f"| `{path[-1]}` | {values} | {_default(field)} | {about} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = default_of(field)
    return "–" if value is None else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return one_line(text).replace("|", r"\|")


def commands_page() -> str:
    group = typer.main.get_command(app)
    lines = [COMMANDS, "| command | |", "|---|---|"]
    found = [*_commands(group, ("gracetune",))]
    lines += [f"| [`{' '.join(names)}`](#{'-'.join(names)}) | {_cell(_help(one))} |" for names, one in found]
    before: dict[str, tuple[str, ...]] = {}
    for names, one in found:
        arguments = [parameter for parameter in one.params if not parameter.opts[0].startswith("-")]
        written = [_argument(argument) for argument in arguments]
        lines += ["", f"## {' '.join(names)}", "", one_line(_help(one))]
        listed = [f"- {name}: {one_line(about.help)}" for name, about in zip(written, arguments, strict=True)]
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
