"""`gracetune.extension`: every name leads somewhere, and packages of others import nothing else but gh200."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracetune import extension

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("gracetune.extension", "gracetune.gh200")
SOURCES = [path for folder in ("overlays", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
CODE = re.compile(r"^`([\w./]+)`\n\n```python\n(.*?)^```$", re.M | re.S)


def modules(tree: ast.AST) -> Iterator[str]:
    """Every module of gracetune that some code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "gracetune":
            yield from (f"gracetune.{one.name}" for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def private(tree: ast.AST) -> set[str]:
    return {name for name in modules(tree) if name.split(".")[0] == "gracetune" and name not in PUBLIC}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_overlays_and_examples_import_only_what_is_public(path: Path) -> None:
    assert private(ast.parse(path.read_text(encoding="utf-8"))) == set()


def test_so_does_the_code_on_the_page_that_is_for_packages_of_others() -> None:
    blocks = CODE.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    outside = [code for file, code in blocks if not file.startswith("src/")]
    assert len(outside) > 5
    for code in outside:
        assert private(ast.parse(code)) == set()


def test_every_name_is_there_and_type_checkers_see_the_same() -> None:
    tree = ast.parse(Path(extension.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported: dict[str, str] = {}
    shown: dict[str, str] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {str(one.asname): f"{node.module}:{one.name}" for one in node.names}
        elif isinstance(node, ast.Assign):
            shown[ast.unparse(node.targets[0])] = imported[ast.unparse(node.value)]
    shown |= {name: place for name, place in imported.items() if name.startswith("__") or name[0] != "_"}
    assert {name: extension._HOMES[name] for name in dir(extension)} == shown
    for name in dir(extension):
        assert getattr(extension, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        _ = extension.Nothing


def test_what_configs_are_checked_with_brings_no_torch() -> None:
    code = (
        "import sys\nfrom gracetune.extension import Flavour, OptimizerRecord, Problem, class_of\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(extension._FORMER))
def test_a_former_name_still_works_and_warns(name: str) -> None:
    new = extension._FORMER[name]
    with pytest.warns(DeprecationWarning, match=rf"extension\.{name} is now called {new}"):
        assert getattr(extension, name) is getattr(extension, new)
