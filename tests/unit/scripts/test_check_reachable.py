"""The check finds what nothing reaches, and only that. `make lint` runs it over the repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
FILES = {
    "src/gracetune/__init__.py": "",
    "src/gracetune/__main__.py": "from gracetune.cli.main import main\nmain()\n",
    "src/gracetune/gh200.py": "__all__ = ['promised']\ndef promised(): ...\ndef forgotten(): ...\n",
    "src/gracetune/cli/main.py": """
import typer
app = typer.Typer()

@app.command()
def show() -> None:
    from gracetune.store import Folder
    with Folder.at("x") as folder, open("y") as file:
        file.write(folder.read())

@app.command()
def bench() -> None:
    from gracetune import bench
    bench.run()

def main() -> None:
    app()
""",
    "src/gracetune/cli/summary.py": "def print_summary() -> None: ...\n",
    "src/gracetune/store.py": """
from typing import Protocol

class Backend(Protocol):
    def read(self) -> str: ...
    def write(self, text: str) -> None: ...

class Folder:
    @classmethod
    def at(cls, path: str) -> 'Folder': ...
    def __enter__(self) -> 'Folder': ...
    def read(self) -> str:
        return self._whole
    @property
    def _whole(self) -> str:
        return helper()
    def write(self, text: str) -> None: ...
    def refresh(self) -> None:
        only_from_dead_code()

def helper() -> str: ...
def only_from_dead_code() -> None: ...
class Pool: ...
""",
    "src/gracetune/bench.py": "from gracetune.store import Pool\ndef run():\n    Pool()\ndef unused(): ...\n",
    "src/gracetune/documented.py": "class Point:\n    def used_by_others(self): ...\n    def inner(self): ...\n",
    "docs/extending.md": "Use `gracetune.documented.Point.used_by_others`.\n",
}


def test_what_nothing_reaches_is_found(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("check_reachable", REPOSITORY / "scripts" / "check_reachable.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = check
    spec.loader.exec_module(check)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert set(check.unreachable(tmp_path)) == {
        "gracetune.gh200.forgotten",
        "gracetune.cli.summary.print_summary",
        "gracetune.store.Backend",  # no annotation of reached code names it
        "gracetune.store.Backend.read",
        "gracetune.store.Backend.write",
        "gracetune.store.Folder.write",  # what is written to is a file
        "gracetune.store.Folder.refresh",
        "gracetune.store.only_from_dead_code",
        "gracetune.store.Pool",  # of a bench only
        "gracetune.bench.unused",
        "gracetune.documented.Point.inner",
    }
