"""Sections that commands add to a run's report, such as the comparison of its checkpoints.

Each is a JSON file in `report/` in the run's folder. `write_report` shows all of them.

    {"format": "gracetune-report-section", "version": 1, "made_s": 1.0, "title": "...", "notes": ["..."],
     "cards": [{"title": "...", "text": "...", "images": [["path in the run's folder", "label"]]}]}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gracetune.storage.atomic import write_file

FOLDER = "report"
SECTION_FORMAT, SECTION_VERSION = "gracetune-report-section", 1


@dataclass(frozen=True)
class ReportCard:
    """A heading with a text and images below it."""

    title: str
    text: str = ""
    images: tuple[tuple[str, str], ...] = ()
    """Path relative to the run's folder, and label."""


@dataclass(frozen=True)
class ReportSection:
    title: str
    notes: tuple[str, ...] = ()
    cards: tuple[ReportCard, ...] = ()


def write_section(run_folder: Path, name: str, section: ReportSection) -> None:
    """Add a section to the reports that are written from now on. It replaces an earlier one of the same name."""
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    value = {"format": SECTION_FORMAT, "version": SECTION_VERSION, "made_s": time.time(), **asdict(section)}
    write_file(folder / f"{name}.json", f"{json.dumps(value, indent=1)}\n".encode())


def read_sections(run_folder: Path, *, since_s: float) -> Iterator[ReportSection]:
    """All sections, by file name. In the place of an unreadable one is a section that names the file.

    Of one that was made before `since_s`, when the run went on, only the title is left.
    """
    for path in sorted((run_folder / FOLDER).glob("*.json")):
        try:
            yield _section(json.loads(path.read_bytes()), since_s)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            yield ReportSection(path.stem, (f"{FOLDER}/{path.name} cannot be read: {type(error).__name__}",))


def _section(value: Any, since_s: float) -> ReportSection:
    if (value["format"], value["version"]) != (SECTION_FORMAT, SECTION_VERSION):
        raise ValueError("another format")
    if float(value["made_s"]) < since_s:
        return ReportSection(str(value["title"]), ("The run went on after this was made: run the command again.",))
    cards = [
        ReportCard(
            str(card["title"]), str(card["text"]), tuple((str(path), str(label)) for path, label in card["images"])
        )
        for card in value["cards"]
    ]
    return ReportSection(str(value["title"]), tuple(map(str, value["notes"])), tuple(cards))
