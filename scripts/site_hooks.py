"""Hooks of the docs site (mkdocs.yml): the home page, files outside `docs/` that pages link to, lists as on GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the site that are not in `docs/`, and their names there."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the home page, the changelog, and files outside `docs/` that a page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text().replace("](docs/", "](")))
    links = {found[1] for page in files.documentation_pages() for found in _OUTSIDE.finditer(page.content_string)}
    for path in sorted(links):
        if (ROOT / path).is_file() and files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _with_blank_lines(_OUTSIDE.sub(r"](\1", markdown))


def _with_blank_lines(markdown: str) -> str:
    """Python-Markdown starts a list only after a blank line; GitHub does not need one."""
    lines: list[str] = []
    is_fenced = False
    for line in markdown.split("\n"):
        previous = lines[-1] if lines else ""
        is_paragraph = bool(previous.strip()) and not previous.startswith((" ", "|", "#")) and not _ITEM.match(previous)
        if _ITEM.match(line) and is_paragraph and not is_fenced:
            lines.append("")
        if line.startswith("```"):
            is_fenced = not is_fenced
        lines.append(line)
    return "\n".join(lines)
