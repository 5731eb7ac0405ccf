"""Caption tables: captions in one CSV, JSONL, JSON or Parquet file, with one or more rows per media file.

A row names its file by the path below the dataset's root, by the full path, or by the file name alone. Backslashes and
`./` are normalized. Several rows for one file, or a list in the caption column, give the file several captions.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gracetune.config.dataset_config import CaptionTable
from gracetune.config.draft import describe
from gracetune.config.limits import LARGEST_TABLE, LONGEST_TEXT, MOST_CAPTIONS, MOST_COLUMNS
from gracetune.config.spelling import nearest
from gracetune.data.backend import Backend
from gracetune.data.backends.paths import split_suffix
from gracetune.data.errors import DataError
from gracetune.data.text_format import some
from gracetune.units import format_bytes

TableKind = Literal["parquet", "csv", "jsonl", "json"]
Row = tuple[str, Mapping[str, Any]]
"""A row's location, for messages, and its values by column."""


@dataclass(frozen=True)
class CaptionEntry:
    """The table's data about one file."""

    captions: tuple[str, ...]
    size: tuple[int, int] | None = None
    """Width and height, if the table has columns for them."""


class CaptionEntries:
    """The entries of one table, looked up by a file's path below the dataset's root."""

    def __init__(self, entries: Mapping[str, CaptionEntry], options: CaptionTable) -> None:
        self._entries, self._options = entries, options

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, path: str) -> CaptionEntry | None:
        """Look up the whole path first, then the file name alone, which matches entries without a folder."""
        whole = path if self._options.identifier_includes_extension else split_suffix(path)[0]
        return self._entries.get(whole) or self._entries.get(whole.rpartition("/")[2])


def load_table(kind: TableKind, options: CaptionTable, backend: Backend) -> CaptionEntries:
    """Read a table from the dataset's folder, or else from any path on this machine."""
    return read_table(_bytes(options.path, backend), kind, options, backend.root)


def read_table(data: bytes | memoryview, kind: TableKind, options: CaptionTable, root: str) -> CaptionEntries:
    """Parse a table. Raises DataError with the row and the reason."""
    roots = _spellings(root)
    captions: dict[str, list[str]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for location, row in _rows(data, kind, options):
        name = _cell(row, options.filename_column, location)
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{location}: `{options.filename_column}` is {_shown(name)}, expected a file name")
        key = _below(name, roots)
        columns = options.caption_column if isinstance(options.caption_column, tuple) else (options.caption_column,)
        own = [text for column in columns for text in _captions(_cell(row, column, location), location)]
        if not own and options.fallback_caption_column is not None:
            own = _captions(_cell(row, options.fallback_caption_column, location), location)
        captions.setdefault(key, []).extend(own)
        wrong = why_no_captions(captions[key])
        if wrong is not None:
            raise DataError(f"{location}: {wrong}")
        size = _size(row, options, location)
        if size is not None:
            sizes[key] = size
    if not captions:
        raise DataError(f"{options.path}: the table has no rows; correct captions.table.path")
    return CaptionEntries({key: CaptionEntry(tuple(found), sizes.get(key)) for key, found in captions.items()}, options)


def read_rows(data: bytes | memoryview, kind: TableKind, path: str) -> Iterator[Row]:
    """Every row with all of its columns. Used where the column names are not configured."""
    return _rows(data, kind, CaptionTable(path=path), everything=True)


def table_kind(path: str) -> TableKind | None:
    """The kind of table by file extension; None if it is not a table."""
    kinds: dict[str, TableKind] = {
        ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet",
    }  # fmt: skip
    return kinds.get(PurePosixPath(path).suffix.lower())


def why_no_captions(texts: Sequence[str]) -> str | None:
    """Why these texts are rejected as the captions of one file; None if they are accepted."""
    if len(texts) > MOST_CAPTIONS:
        return f"{len(texts):,} captions for one file; expected at most {MOST_CAPTIONS:,}"
    longest = max(map(len, texts), default=0)
    if longest > LONGEST_TEXT:
        return f"a caption of {longest:,} characters; expected at most {LONGEST_TEXT:,}: shorten it"
    return None


def _rows(
    data: bytes | memoryview, kind: TableKind, options: CaptionTable, *, everything: bool = False
) -> Iterator[Row]:
    if len(data) > LARGEST_TABLE:
        raise _too_large(options.path, len(data))
    try:
        if kind == "parquet":
            yield from _parquet_rows(data, options, everything=everything)
        else:
            yield from _ROWS[kind](data, options)
    except RecursionError:
        raise DataError(f"{options.path}: the JSON is nested too deeply; expected rows of text") from None


def _too_large(path: str, size: int) -> DataError:
    expected = f"at most {format_bytes(LARGEST_TABLE)}"
    return DataError(f"{path}: a table of {format_bytes(size)}; expected {expected}. Split the dataset into several")


def _shown(value: Any) -> str:
    """A value for a message, cut to 80 characters."""
    return describe(value) if isinstance(value, Mapping | list | tuple) else repr(value)[:80]


def _bytes(path: str, backend: Backend) -> bytes | memoryview:
    inside = PurePosixPath(_below(path, _spellings(backend.root)))
    if not inside.is_absolute() and ".." not in inside.parts and backend.exists(str(inside)):
        size = backend.stat(str(inside)).size
        if size > LARGEST_TABLE:
            raise _too_large(path, size)
        return backend.read(str(inside))
    try:
        size = Path(path).stat().st_size
        if size > LARGEST_TABLE:
            raise _too_large(path, size)
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: no such table in {backend.root} or on this machine ({error.strerror}); "
            "correct captions.table.path"
        ) from error


def _spellings(root: str) -> tuple[str, ...]:
    """The root as written, as an absolute path, and with symbolic links resolved. Rows may use any of these."""
    root_path = Path(root)
    return (root,) if "://" in root else (root, str(root_path.absolute()), str(root_path.resolve()))


def _below(name: str, roots: tuple[str, ...]) -> str:
    """A file's path below the root, or the normalized path if it lies elsewhere."""
    name = name.strip().replace("\\", "/")
    for root in roots:
        prefix = root.replace("\\", "/").rstrip("/") + "/"
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return str(PurePosixPath(name))


def _captions(value: Any, location: str) -> list[str]:
    if value is None or (isinstance(value, float) and value != value):  # NaN: a missing text in some Parquet files
        return []
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):  # JSON escapes can encode a lone surrogate
            found = f"the caption {_shown(value)} contains a lone surrogate (half a character)"
            raise DataError(f"{location}: {found}; correct its \\u escapes")
        return [value.strip()] if value.strip() else []
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple) for item in value):
            raise DataError(f"{location}: the caption is a list of lists, expected text or a list of texts")
        return [text for item in value for text in _captions(item, location)]
    raise DataError(f"{location}: the caption is {_shown(value)}, expected text or a list of texts")


def _size(row: Mapping[str, Any], options: CaptionTable, location: str) -> tuple[int, int] | None:
    if options.width_column is None or options.height_column is None:
        return None
    columns = (options.width_column, options.height_column)
    sides = [_cell(row, column, location) for column in columns]
    try:
        width, height = (int(side) for side in sides)
    except (TypeError, ValueError, OverflowError) as error:
        found = f"the size is {_shown(sides[0])} x {_shown(sides[1])}"
        raise DataError(f"{location}: {found}, expected whole numbers") from error
    return width, height


def _cell(row: Mapping[str, Any], column: str, location: str) -> Any:
    if column in row or column.partition(".")[0] in row:
        return value_at(row, column)
    near = nearest(column, [str(name) for name in row])
    hint = f"write `{near}`" if near else "name one of them in captions.table"
    columns = some([str(name)[:80] for name in row], 20)
    raise DataError(f"{location}: no column `{column}`; the columns are {columns}. {hint}")


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column. `a.b` is the key `b` of the object in column `a`. None if it does not exist."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _text(data: bytes | memoryview, path: str) -> str:
    try:
        return bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = bytes(data[: error.start]).count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8; save it as UTF-8") from error


def _csv_rows(data: bytes | memoryview, options: CaptionTable) -> Iterator[Row]:
    separator = "\t" if options.path.lower().endswith(".tsv") else ","
    reader = csv.DictReader(io.StringIO(_text(data, options.path), newline=""), delimiter=separator, strict=True)
    try:
        columns = reader.fieldnames or ()
        if len(columns) > MOST_COLUMNS:
            raise DataError(f"{options.path}: {len(columns):,} columns; expected at most {MOST_COLUMNS:,}")
        for row in reader:
            location = f"{options.path}, line {reader.line_num}"
            if None in row:
                raise DataError(f"{location}: more cells than columns; put captions with commas in quotes")
            yield location, row
    except csv.Error as error:
        raise DataError(f"{options.path}, after line {reader.line_num}: {error}") from error


def _jsonl_rows(data: bytes | memoryview, options: CaptionTable) -> Iterator[Row]:
    # Split at \n only: splitlines() also splits at characters that a caption may contain.
    for number, line in enumerate(_text(data, options.path).split("\n"), start=1):
        if line.strip():
            location = f"{options.path}, line {number}"
            yield location, _object(_parsed(line, location), location)


def _json_rows(data: bytes | memoryview, options: CaptionTable) -> Iterator[Row]:
    """Rows of a JSON list, or of captions by file: `{"a.jpg": "a cat"}` or `{"a.jpg": {"caption": "a cat"}}`."""
    content = _parsed(_text(data, options.path), options.path)
    if isinstance(content, list):
        for number, row in enumerate(content):
            location = f"{options.path}, entry {number}"
            yield location, _object(row, location)
        return
    for name, value in _object(content, options.path).items():
        column = options.caption_column if isinstance(options.caption_column, str) else options.caption_column[0]
        row = value if isinstance(value, dict) else {column: value}
        yield f"{options.path}, {name}", {**row, options.filename_column: name}


_PARQUET_ROWS = 1024
"""Rows decoded at a time. Compressed Parquet can expand to gigabytes, so a table is never decoded whole."""


def _parquet_rows(data: bytes | memoryview, options: CaptionTable, *, everything: bool) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(
            f"{options.path}: reading Parquet needs pyarrow, which is not installed; type: pip install pyarrow"
        ) from error
    captions = options.caption_column if isinstance(options.caption_column, tuple) else (options.caption_column,)
    named = (options.filename_column, *captions, options.fallback_caption_column, options.width_column,
             options.height_column)  # fmt: skip
    wanted = {name for one in named if one is not None for name in (one, one.partition(".")[0])}
    try:
        file = parquet.ParquetFile(arrow.BufferReader(arrow.py_buffer(data)))
        columns = [name for name in file.schema_arrow.names if everything or name in wanted]
        number = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns or None):
            for row in batch.to_pylist():
                yield f"{options.path}, row {number}", row
                number += 1
    except arrow.ArrowException as error:
        raise DataError(f"{options.path}: the Parquet file is damaged: {error}") from error


def _parsed(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # also raised for integers with more digits than Python converts
        raise DataError(f"{location}: invalid JSON: {error}") from error


def _object(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{location}: a {type(value).__name__}, expected an object with columns as keys")
    return value


_ROWS = {"csv": _csv_rows, "jsonl": _jsonl_rows, "json": _json_rows}
