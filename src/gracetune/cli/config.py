"""`gracetune config check | show | schema`: check config files, print them resolved, print their JSON Schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.console import mark, out, print_json, print_problems, problem_json, session, shown
from gracetune.config import Environment, Resolved, UnresolvedError, load, native
from gracetune.config.machine_checks import limits_memory, path_problems, size_warnings
from gracetune.config.path_status import inspect_path
from gracetune.config.pydantic_errors import schema as config_schema
from gracetune.errors import ConfigError, Problem, visible
from gracetune.hardware import probe

app = typer.Typer(
    cls=CommandGroup,
    help="Check, resolve and describe configuration files.",
    no_args_is_help=True,
    add_completion=False,
)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value; repeatable.")
]
AllowUnsupported = Annotated[bool, typer.Option("--allow-unsupported", help="Ignore unsupported settings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True)
class CheckedFile:
    """The result of checking one file."""

    path: Path
    dialect: str | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "dialect": self.dialect,
            "ok": not self.problems,
            "problems": [problem_json(one) for one in self.problems],
            "notes": list(self.notes),
        }


def check_file(
    path: Path,
    environment: Environment,
    overrides: list[str] | None = None,
    *,
    allow_unsupported: bool = False,
    paths: bool = True,
) -> CheckedFile:
    """Find all problems of one file. `paths=False` skips what depends on this machine: paths, memory, and the memory
    options in environment variables."""
    environment = environment if paths else environment.without_memory_options()
    try:
        resolved = load(path, environment=environment, overrides=overrides or (), allow_unsupported=allow_unsupported)
    except UnresolvedError as error:
        return CheckedFile(path, error.dialect, error.problems, error.notes)
    except ConfigError as error:
        return CheckedFile(path, None, error.problems, ())
    problems = path_problems(resolved) if paths else []
    warnings = size_warnings(resolved, probe().host.memory_limit) if paths and limits_memory(resolved) else []
    return CheckedFile(path, resolved.dialect, tuple(problems), (*resolved.notes, *warnings))


@app.command()
def check(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", readable=False, help="Configuration files of any dialect.")
    ],
    overrides: Overrides = None,
    no_paths: Annotated[
        bool, typer.Option("--no-paths", help="Skip paths: the files are for another machine.")
    ] = False,
    allow_unsupported: AllowUnsupported = False,
    as_json: AsJson = False,
) -> None:
    """Parse and validate files. List all problems at once. Exit 1 if there are any."""
    environment = session(context).environment
    checked = [
        check_file(path, environment, overrides, allow_unsupported=allow_unsupported, paths=not no_paths)
        for path in _without_folders(files)
    ]
    if as_json:
        print_json({"files": [item.as_json() for item in checked]})
    else:
        print_checked(out(), checked)
    raise typer.Exit(1 if any(item.problems for item in checked) else 0)


def _without_folders(paths: list[Path]) -> list[Path]:
    """`paths` without folders, which are reported: a shell's `examples/*` also names folders with sidecar files. If all
    paths are folders, keep them, so that each is an error."""
    folders = [path for path in paths if inspect_path(path).kind == "folder"]
    if len(folders) == len(paths):
        return paths
    for folder in folders:
        typer.echo(f"{visible(str(folder))}: a folder, not checked", err=True)
    return [path for path in paths if path not in folders]


def print_checked(console: Console, checked: list[CheckedFile]) -> None:
    for item in checked:
        count = f": {len(item.problems)} problem{'s' * (len(item.problems) > 1)}" if item.problems else ""
        name, dialect = shown(str(item.path)), item.dialect or "unknown dialect"
        console.print(f"{mark(console, ok=not item.problems)} [bold]{name}[/] ({dialect}){count}")
        print_problems(console, item.problems, str(item.path))
        for note in item.notes:
            console.print(f"    note      {shown(note)}")


@app.command()
def show(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", readable=False, help="A configuration file of any dialect.")],
    overrides: Overrides = None,
    allow_unsupported: AllowUnsupported = False,
    as_json: AsJson = False,
) -> None:
    """Print the resolved config in our own dialect, with the origin of each value."""
    resolved = session(context).load(file, overrides, allow_unsupported=allow_unsupported)
    if as_json:
        print_json(_as_json(resolved))
        return
    print(f"# {visible(str(file))}, read as {resolved.dialect}")
    for note in resolved.notes:
        print(f"# note: {visible(note)}")
    print(native.show(resolved.config, resolved.origins, resolved.redactor), end="")


def _as_json(resolved: Resolved) -> dict[str, Any]:
    return {
        "path": str(resolved.file),
        "dialect": resolved.dialect,
        "config": resolved.redactor.redact_values(resolved.config.model_dump(mode="json")),
        "origins": native.flat(resolved.config, resolved.origins),
        "notes": list(resolved.notes),
    }


@app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of our own dialect, for editors."""
    schema = dict(config_schema())
    version = {native.VERSION_KEY: {"const": native.VERSION, "description": "Version of the format."}}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"] = {**version, **schema["properties"]}
    schema["required"] = [native.VERSION_KEY, *schema["required"]]
    print_json(schema, is_schema=True)
