"""docs/architecture.md and the README's tree: what they name exists; the folders are those of the layer contract."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from unit.docs.targets import ROOT, command, key, python, rows, spans, text_of

PACKAGE = ROOT / "src" / "gracetune"
TEXT = text_of("architecture.md")
DRAWING = re.findall(r"^```\n(.*?)^```$", TEXT, re.M | re.S)[0]
LINES = [line for line in TEXT.replace(DRAWING, "").splitlines() if spans(line)]
OTHERS = ("lint-imports", "[tool.importlinter]", "SimpleTuner")
"""A program, a section of pyproject.toml, another project."""
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
LAYERS = [re.findall(r"\w+", layer) for layer in reversed(CONTRACT)]
FOLDERS = [row for row in rows(TEXT) if row[-1].startswith(("each other", "the rows", "`storage/` and"))]


def _found(span: str, line: str) -> list[Path]:
    """The files and folders that a path stands for. `<name>` is any name; a bare file is in a folder of the line."""
    pattern = re.sub(r"<\w+>", "*", span).rstrip("/")
    folders = [PACKAGE, ROOT]
    if "/" not in span:
        folders += [path for other in spans(line) if other.endswith("/") for path in _found(other, "")]
    return [path for folder in folders for path in folder.glob(pattern)]


def _is_path(span: str) -> bool:
    return "/" in span or span.endswith((".py", ".toml"))


@cache
def _defined(path: Path) -> frozenset[str]:
    """Every name that a file, or a file of a folder, defines."""
    found: set[str] = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _problem(span: str, line: str) -> str | None:
    if span in OTHERS:
        return None
    if span.startswith(("gracetune ", "python ", "make ")):
        return command(span)
    if span.startswith("gracetune."):
        return python(span)
    if _is_path(span):
        return None if _found(span, line) else f"{span}: no such file"
    if "." in span:
        return key(span)
    files = [path for other in spans(line) if _is_path(other) for path in _found(other, line)]
    return (
        None if any(span in _defined(path) for path in files if path.suffix != ".toml") else f"{span}: not in {files}"
    )


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_what_a_line_names_is_there(line: str) -> None:
    assert [problem for span in spans(line) if (problem := _problem(span, line))] == []


def test_what_the_drawing_names_is_there() -> None:
    folders = set(re.findall(r"(?<![/\w])(\w+)/", DRAWING))
    assert [folder for folder in folders if not (PACKAGE / folder).is_dir()] == []
    names = {*re.findall(r"(\w+)\(\)", DRAWING), *re.findall(r"\b(?:[A-Z][a-z]+)+\b", DRAWING)} - {*OTHERS}
    assert len(names) > 10
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [name for name in names if not re.search(rf"^(?:def|class) {name}\b", source, re.M)] == []


def test_the_folders_are_those_of_the_layer_contract_in_its_order() -> None:
    assert [[Path(span).stem for span in spans(row[0])] for row in FOLDERS] == [sorted(layer) for layer in LAYERS]


def test_what_a_folder_may_import_is_what_the_contract_says() -> None:
    for row, layer in zip(FOLDERS, reversed(CONTRACT), strict=True):
        assert ("not each other" in row[2]) == ("|" in layer), row
        assert row[2].startswith("each other") == (":" in layer), row


def test_a_name_that_is_not_there_is_noticed() -> None:
    line = "`choose_attention` in `models/attention.py`, `FORMAT` in `adapters/formats/<name>.py`"
    assert [_problem(span, line) for span in spans(line)] == [None] * 4
    assert _problem("choose_a_tension", line) is not None
    assert _problem("models/attentive.py", line) is not None
    assert _problem("models/<family>/nams.py", line) is not None


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """`make lint` builds the site, which checks the links themselves."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- ([\w-]+\.md)$", navigation, re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
