"""Rows of a dataset's tables: filtering them, writing them to the copy, and recognizing their media.

Each part of a copy stores its rows in `.rows.jsonl`: `file_name`, relative to the copy's `data`, and all other columns
except media and long lists of numbers. The copy's `metadata.jsonl` has the rows of all parts and can be used as a
caption table.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageOps, UnidentifiedImageError

from gracetune.config.dataset_config import RowFilter, Tile
from gracetune.data.caption_tables import value_at
from gracetune.data.media import Kind, extension_of, kind_of
from gracetune.storage.atomic import LineFile

ROWS: Final = ".rows.jsonl"
METADATA: Final = "metadata.jsonl"
FILE_NAME: Final = "file_name"
FILTERED: Final = "rows that do not pass local_copy.filter"
_LONGEST_LIST = 64
"""Limit for lists of values other than text. Longer ones are embeddings and the like, which captions do not use."""


def passes(row: Mapping[str, Any], filters: Iterable[RowFilter]) -> bool:
    """Whether a row passes all filters."""
    return all(_passes(value_at(row, rule.column), rule) for rule in filters)


def _passes(value: Any, wanted: RowFilter) -> bool:
    if wanted.one_of and str(value) not in wanted.one_of:
        return False
    if wanted.minimum is None:
        return True
    try:
        return float(value) >= wanted.minimum  # CSV tables have numbers as text
    except (TypeError, ValueError):
        return wanted.minimum <= 0  # a missing number counts as 0


def plain(value: Any) -> Any:
    """A value in a form that JSON supports; None for values that cannot be part of a caption."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Decimal | timedelta):
        return float(value if isinstance(value, Decimal) else value.total_seconds())
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items if len(items) <= _LONGEST_LIST or all(isinstance(item, str) for item in items) else None
    return None


class PartWriter:
    """Writes the files and rows of a part to a temporary folder, which the caller publishes when it is complete."""

    def __init__(self, folder: Path, name: str, *, kind: Kind, tile: Tile | None = None) -> None:
        """`name` is the path of the published folder below the copy's `data`."""
        self._folder, self._name, self._kind, self._tile = folder, name, kind, tile
        self._rows = LineFile(folder / ROWS)
        self.files = 0
        self.samples = 0
        self.size = 0
        """Bytes of the files."""
        self.left_out: dict[str, int] = {}
        self.columns: dict[str, None] = {}

    def add(self, name: str, data: bytes | memoryview, row: Mapping[str, Any], called: str | None = None) -> None:
        """Add a sample. `name` has no extension: the content decides it, or else the original name `called`."""
        extension = media_extension(data, self._kind)
        if extension is None and called is not None and kind_of(called) == self._kind:
            extension = extension_of(called)
        if extension is None:
            self.leave_out(f"a file without {self._kind} content")
            return
        if self._tile is not None and self._kind == "image":
            try:
                data, extension = cut_tile(data, self._tile), "png"
            except (OSError, ValueError, UnidentifiedImageError) as error:
                self.leave_out(f"an image that cannot be cropped: {error}")
                return
        file = f"{name}.{extension}"
        self.add_file(file, data)
        self.samples += 1
        values = {key: plain(value) for key, value in row.items()}
        self.columns.update(dict.fromkeys(values))
        line = json.dumps({**values, FILE_NAME: f"{self._name}/{file}"}, ensure_ascii=False)
        self._rows.write(line.encode(errors="backslashreplace") + b"\n")

    def add_file(self, name: str, data: bytes | memoryview) -> None:
        """Add a file unchanged, such as a caption or another sidecar."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.files += 1
        self.size += len(data)

    def leave_out(self, reason: str) -> None:
        """Count a sample that is left out."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def merge(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Add columns from a table inside the part. `known` maps paths below the folder to rows."""
        file = self._folder / ROWS
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        merged = [{**known.get(row[FILE_NAME].removeprefix(f"{self._name}/"), {}), **row} for row in rows]
        self.columns.update(dict.fromkeys(name for row in merged for name in row))
        self._rows.close()
        file.unlink()
        self._rows = LineFile(file)
        for row in merged:
            self._rows.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        self._rows.close()


def cut_tile(data: bytes | memoryview, tile: Tile) -> bytes:
    """Crop one of several images that are side by side in a file. Returns PNG, to avoid a second lossy compression."""
    with Image.open(io.BytesIO(data)) as opened:
        whole = ImageOps.exif_transpose(opened)
        width = whole.width // tile.count
        if not width:
            raise ValueError(f"{whole.width} pixels wide, too narrow for {tile.count} images side by side")
        tile_image = whole.crop((tile.index * width, 0, (tile.index + 1) * width, whole.height))
    buffer = io.BytesIO()
    tile_image.save(buffer, "PNG")
    return buffer.getvalue()


# -- file types by content --------------------------------------------------------------------------------------------

_BEGINNINGS: Final = (
    (b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"P6", "ppm"), (b"P5", "ppm"), (b"II*\0", "tif"), (b"MM\0*", "tif"), (b"\0\0\0\x0cjP", "jp2"),
    (b"\x1aE\xdf\xa3", "mkv"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3"), (b"FORM", "aiff"),
)  # fmt: skip
_RIFF: Final = {b"WEBP": "webp", b"AVI ": "avi", b"WAVE": "wav"}


def media_extension(data: bytes | memoryview, kind: Kind) -> str | None:
    """The extension of a file with this content; None if it is not of this kind.

    Besides the fixed signatures: RIFF has its type at byte 8, MP4 and MOV have a box name at byte 4, and an MP3 without
    ID3 tag begins with eleven set bits.
    """
    start = bytes(data[:16])
    found = next((extension for beginning, extension in _BEGINNINGS if start.startswith(beginning)), None)
    if found is None and start[:4] == b"RIFF":
        found = _RIFF.get(start[8:12])
    if found is None and start[4:8] == b"ftyp":
        found = "avif" if start[8:12] in (b"avif", b"avis") else "m4a" if start[8:11] == b"M4A" else "mp4"
    if found is None and start[4:8] in (b"moov", b"mdat", b"wide"):
        found = "mov"
    if found is None and start[:1] == b"\xff" and len(start) > 1 and start[1] & 0xE0 == 0xE0:
        found = "mp3"
    if found == "mp4" and kind == "audio":
        return "m4a"
    if found == "gif" and kind == "video":
        return None
    return found if found is not None and kind_of(f"x.{found}") == kind else None


def media_bytes(value: Any) -> bytes | memoryview | str:
    """The bytes in a cell of a media column, or a text that says why there are none."""
    if isinstance(value, Mapping):
        inside = value.get("bytes")
        if inside is None and value.get("path"):
            return "a file name instead of a file's bytes"
        value = inside
    if isinstance(value, bytes | memoryview):
        return value if len(value) else "an empty cell"
    if isinstance(value, str) and value.startswith("data:"):
        return base64.b64decode(value.partition(",")[2])
    return "an empty cell" if value is None else f"{type(value).__name__} instead of a file's bytes"


def stem_of(path: str) -> str:
    """The path without its extension. `.tar.gz` and the like count as one extension."""
    for ending in (".tar.gz", ".tar.bz2", ".tar.xz"):
        if path.lower().endswith(ending):
            return path[: -len(ending)]
    extension = extension_of(path)
    return path[: -len(extension) - 1] if extension else path
