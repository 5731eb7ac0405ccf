"""The sample grid of the report: one row per prompt, one column per validation. Thumbnails are embedded in the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from gracetune.telemetry.curves import evenly_spaced_indices
from gracetune.telemetry.events import SampleFile, ValidationDone

MOST_COLUMNS, MOST_ROWS = 12, 24
SIDE = 192
_QUALITY = 80


@dataclass(frozen=True)
class SampleCell:
    step: int
    file: SampleFile
    link: str | None
    """Relative address; None if the file is outside the run's folder or was deleted."""
    image: str | None
    """The thumbnail as a data URL."""


@dataclass(frozen=True)
class SampleRow:
    prompt: str
    seed: int | None
    cells: tuple[SampleCell, ...]


@dataclass(frozen=True)
class SampleGrid:
    rows: tuple[SampleRow, ...]
    notes: tuple[str, ...]
    sheets: tuple[tuple[int, str], ...] = ()
    """Contact sheets: step and relative address."""


def grid(validations: Sequence[ValidationDone], run_folder: Path) -> SampleGrid:
    """The grid of a run's samples. If there are more validations than columns, it shows evenly spaced ones."""
    with_files = [one for one in validations if one.files]
    shown = [with_files[index] for index in evenly_spaced_indices(len(with_files), MOST_COLUMNS)]
    rows = min(MOST_ROWS, max((len(one.files) for one in shown), default=0))
    notes = []
    if len(with_files) > len(shown):
        notes.append(f"{len(shown)} of {len(with_files)} validations are shown; the others are in the run's folder.")
    most = max((len(one.files) for one in shown), default=0)
    if most > rows:
        notes.append(f"{rows} of {most} samples of a validation are shown.")
    sheets = [(one.step, link_to(one.sheet, run_folder)) for one in validations if one.sheet is not None]
    return SampleGrid(
        tuple(_row(shown, number, run_folder) for number in range(rows)),
        tuple(notes),
        tuple((step, link) for step, link in sheets if link is not None),
    )


def _row(validations: Sequence[ValidationDone], number: int, run_folder: Path) -> SampleRow:
    long_enough = [one for one in validations if number < len(one.files)]
    cells = tuple(_cell(one.step, one.files[number], run_folder) for one in long_enough)
    last = cells[-1].file
    return SampleRow(last.prompt, last.seed, cells)


def _cell(step: int, file: SampleFile, run_folder: Path) -> SampleCell:
    link = link_to(file.path, run_folder)
    image = thumbnail(run_folder / file.path) if link is not None and file.kind == "image" else None
    return SampleCell(step, file, link, image)


def link_to(path: str, run_folder: Path) -> str | None:
    """The relative address of a file in the run's folder; None for any other path, because a log is untrusted input."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or "\0" in path or not (run_folder / plain).is_file():
        return None
    return "./" + quote(str(plain))  # without "./", a browser would read a name like "mailto:x" as a URL


def thumbnail(path: Path) -> str | None:
    """A JPEG thumbnail as a data URL; None if the file is not a readable image."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        stored = io.BytesIO()
        small.save(stored, "JPEG", quality=_QUALITY)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow raises these for bad files
        return None
    return "data:image/jpeg;base64," + base64.b64encode(stored.getvalue()).decode()
