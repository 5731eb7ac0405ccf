"""Names in strings of files that run on a GPU only: no type checker reads them, and no test on a CPU uses them."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "tests" / "gpu").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])
DOTTED = re.compile(r"gracetune(?:\.\w+)+")


def strings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imports(program: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gracetune"):
            yield from ((str(node.module), name.name) for name in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_in_strings_exist(file: Path) -> None:
    """What `monkeypatch.setattr` replaces, and what programs in strings import."""
    for text in strings(file):
        if DOTTED.fullmatch(text):
            pkgutil.resolve_name(text)
        if "\nfrom gracetune" in text:
            for module, name in imports(text):
                assert hasattr(import_module(module), name), f"{module} has no {name}"
