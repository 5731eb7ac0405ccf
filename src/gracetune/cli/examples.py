"""`gracetune examples list | copy`: configs to start from, in a checkout and in an installed wheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import gracetune
from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AsJson
from gracetune.cli.console import mark, out, print_json, shown
from gracetune.config.path_status import inspect_path
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, MachineError, Problem
from gracetune.storage.atomic import write_file

INDEX = "index.json"
app = typer.Typer(
    cls=CommandGroup, help="List the examples, and copy one to start from.", no_args_is_help=True, add_completion=False
)


@dataclass(frozen=True)
class Example:
    name: str
    title: str
    files: tuple[str, ...]
    """Paths relative to `checkout()`, as the files name each other. A folder stands for everything in it."""


def checkout() -> Path:
    """The folder that has the examples under their documented paths: inside a wheel, or the root of a checkout."""
    package = Path(gracetune.__file__).parent
    for folder in (package / "checkout", package.parents[1]):
        if (folder / "examples" / INDEX).is_file():
            return folder
    raise MachineError(f"no examples in {package}: install gracetune again, or clone the repository")


def examples() -> dict[str, Example]:
    index = json.loads((checkout() / "examples" / INDEX).read_text(encoding="utf-8"))
    return {name: Example(name, one["title"], tuple(one["files"])) for name, one in index.items()}


@app.command("list")
def list_examples(as_json: AsJson = False) -> None:
    """List the examples."""
    found = examples()
    if as_json:
        print_json(
            {"examples": [{"name": one.name, "title": one.title, "files": [*one.files]} for one in found.values()]}
        )
        return
    width = max(map(len, found))
    for one in found.values():
        out().print(f"{one.name:<{width}}  {shown(one.title)}")


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name from `gracetune examples list`.")],
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="[DEST]", help="Folder to copy into. The files keep their paths below it.", readable=False
        ),
    ] = Path(),
) -> None:
    """Copy an example with the files it names. Never overwrite a file."""
    found = examples()
    if name not in found:
        near = nearest(name, found) or next(iter(found))
        raise ConfigError([Problem("NAME", name, ", ".join(found), f"gracetune examples copy {near}")])
    files = sorted({file for part in found[name].files for file in _files(checkout() / part)})
    copies = {file: destination.expanduser() / file.relative_to(checkout()) for file in files}
    taken = [path for path in copies.values() if inspect_path(path).kind != "nothing"]
    if taken:
        hint = f"another folder: gracetune examples copy {name} DEST"
        raise ConfigError([Problem("DEST", f"{taken[0]}, which is there", "a folder without these files", hint)])
    for file, path in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, file.read_bytes(), replace=False)
        out().print(f"{mark(out(), ok=True)} {shown(str(path))}")


def _files(path: Path) -> list[Path]:
    """The file, or all files in the folder except Python's bytecode caches."""
    if path.is_file():
        return [path]
    return [one for one in path.rglob("*") if one.is_file() and "__pycache__" not in one.parts]
