"""Modules of ours that the docs, comments and docstrings name exist: one that moves takes its references along."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unit.docs.targets import ROOT, key, python, spans, without_fences

PACKAGE = ROOT / "src" / "gracetune"
FOLDERS = "|".join(sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_ELSEWHERE = ("LOG.md", "seed-map.md", "upstream-status.md")
"""A diary, and pages full of other projects' names."""
SOURCES = [path for folder in ("src", "overlays", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
GROUPS = {f"gracetune.{name}" for name in ("families", "backends", "optimizers", "trackers", "export_formats")}
NOT_MODULES = {*GROUPS, "gracetune.dora", "memory.high"}
"""Entry point groups, a key of adapter files, a file of cgroups."""

_PATH = re.compile(rf"(?<![\w/.<>*-])(?:src/gracetune/)?((?:{FOLDERS})(?:/\w+)*/\w+\.py)\b")
_DOTTED = re.compile(rf"(?:gracetune|{FOLDERS})(?:\.\w+)+")
_FILE_NAME = re.compile(r"\w+\.(?:py|json|yaml|toml|env)")


def problems(text: str, code: list[str]) -> list[str]:
    """`code` is what stands between backticks."""
    paths = {found[1] for found in _PATH.finditer(text)}
    found = [
        f"no file {path}" for path in sorted(paths) if not (PACKAGE / path).is_file() and not (ROOT / path).is_file()
    ]
    return found + [problem for span in sorted(set(code)) if (problem := _dotted(span))]


def _dotted(span: str) -> str | None:
    if not _DOTTED.fullmatch(span) or _FILE_NAME.fullmatch(span) or span in NOT_MODULES:
        return None
    ours = span if span.startswith("gracetune.") else f"gracetune.{span}"
    parts = ours.split(".")
    if parts[1] in ("train", "config") and len(parts) < 4:
        return None  # ai-toolkit has sections of these names
    return None if key(span) is None else python(ours)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in TESTED_ELSEWHERE], ids=lambda page: page.name
)
def test_a_page_names_modules_that_exist(page: Path) -> None:
    text = page.read_text().partition("\n## Ten changes\n")[0]  # these add files: tests/runs/test_ten_changes.py
    assert problems(without_fences(text), spans(text)) == []


def test_comments_and_docstrings_name_modules_that_exist() -> None:
    wrong = {}
    for path in SOURCES:
        text = path.read_text()
        if found := problems(text, re.findall(r"`([\w.]+)`", text)):
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_a_module_that_has_moved_is_noticed() -> None:
    assert problems("see memory/planning/plan.py", []) == ["no file memory/planning/plan.py"]
    assert problems("", ["cache.slabs.choose_residence", "models.flow_shift", "gracetune.durable"]) != []
    assert len(problems("", ["cache.slabs.choose_residence", "models.flow_shift", "gracetune.durable"])) == 3
    assert problems("see planning/plan.py", ["cache.residence.choose_residence", "cache.cache_dir", "train.lr"]) == []
