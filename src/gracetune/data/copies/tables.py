"""Tables in a source: `metadata.csv` and the like in a folder of images, lists of URLs, and Parquet files of media.

A Parquet file is unpacked to one media file per row, with the other columns as its row of metadata.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

from gracetune.config.dataset_config import Dataset, RowFilter
from gracetune.config.spelling import nearest
from gracetune.data.caption_tables import read_rows, table_kind
from gracetune.data.copies.errors import CopyError, DamagedPartError
from gracetune.data.copies.rows import FILE_NAME, FILTERED, PartWriter, media_bytes, passes, plain
from gracetune.data.errors import set_option
from gracetune.errors import Problem
from gracetune.units import MIB

METADATA_TABLES: Final = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_USUAL: Final = ("image", "video", "audio")


def is_metadata(path: str) -> bool:
    return PurePosixPath(path).name.lower() in METADATA_TABLES


@dataclass(frozen=True)
class FolderRows:
    """The rows of all tables in a folder of files."""

    rows: Mapping[str, Mapping[str, Any]]
    """By the file's path, which is also the value of `file_name`."""
    columns: tuple[str, ...]
    chosen: bool
    """Whether the media column is one of several. Then only the files it names are samples."""


def folder_rows(dataset: Dataset, tables: Mapping[str, bytes], media: str | None) -> FolderRows:
    """Read the tables of a folder. Rows name files relative to their table, in `file_name` or `<media>_file_name`."""
    rows: dict[str, Mapping[str, Any]] = {}
    columns: dict[str, None] = {}
    chosen = False
    for path, data in sorted(tables.items()):
        kind = table_kind(path)
        if kind is None:
            continue
        folder = PurePosixPath(path).parent
        for location, row in read_rows(data, kind, path):
            columns.update(dict.fromkeys(row))
            name, of_several = _file_of(row, media)
            if name is None:
                continue
            chosen = chosen or of_several
            file = str(PurePosixPath(*_clean(folder / name.strip().replace("\\", "/"), location)))
            values = {key: plain(value) for key, value in row.items() if not key.endswith(FILE_NAME)}
            rows[file] = {**values, FILE_NAME: file}
    if tables and not rows:
        wanted = f"{media}_{FILE_NAME}" if media else FILE_NAME
        found = f"no column `{wanted}` in {', '.join(tables)}; the columns are {', '.join(columns)}"
        hint = f"local_copy.media_column may be {_media_columns(columns)}"
        raise CopyError.of(dataset.id, found=found, expected="the files' names", hint=hint)
    return FolderRows(rows, tuple(columns), chosen)


def check_table_columns(dataset: str, columns: Iterable[str], wanted: Mapping[str, str]) -> None:
    """Raise CopyError if a column is missing. `wanted` maps each column to the option that names it."""
    known = [*columns]
    for column, option in wanted.items():
        if column not in known and column.partition(".")[0] not in known:
            raise CopyError.of_column(dataset, column, option, location="the dataset's tables", supported=known)


def _file_of(row: Mapping[str, Any], media: str | None) -> tuple[str | None, bool]:
    """The file that a row names, and whether the media column is one of several."""
    if media is not None:
        for column in (f"{media}_{FILE_NAME}", media):
            if isinstance(row.get(column), str):
                return row[column], True
    if media is None or media in _USUAL:
        name = row.get(FILE_NAME)
        return (name, False) if isinstance(name, str) else (None, False)
    return None, False


def _media_columns(columns: Iterable[str]) -> str:
    found = [name.removesuffix(f"_{FILE_NAME}") for name in columns if name.endswith(f"_{FILE_NAME}")]
    return ", ".join(found) or "unset"


def _clean(path: PurePosixPath, location: str) -> Iterator[str]:
    """The parts of a path with `..` resolved. Raises CopyError if it leads out of the dataset."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if not parts:
                raise CopyError(
                    Problem(location, f"{path}, which leads out of the dataset", "a file of it", "correct it")
                )
            parts.pop()
        elif part not in (".", ""):
            parts.append(part)
    yield from parts


# -- lists of URLs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """A row with a URL."""

    number: int
    """The row's number in the table."""
    url: str
    row: Mapping[str, Any]


def read_addresses(dataset: str, data: bytes, path: str, column: str) -> list[Address]:
    """The URLs of a table. If several rows have the same URL, the last one counts."""
    kind = table_kind(path)
    if kind is None:
        found, expected = f"{path}, which is not a table", "a csv, jsonl, json or parquet file with a column of URLs"
        raise CopyError.of(dataset, found=found, expected=expected, hint="check the dataset's path")
    found_rows: dict[str, Address] = {}
    for number, (location, row) in enumerate(read_rows(data, kind, path)):
        if column not in row:
            near = nearest(column, [str(name) for name in row])
            hint = set_option(dataset, "local_copy.media_column", near or next(iter(row), "url"))
            found = f"{location}: no column `{column}`; the columns are {', '.join(map(str, row))}"
            raise CopyError.of(dataset, found=found, expected="a column of URLs", hint=hint)
        url = row[column]
        if isinstance(url, str) and url.strip():
            others = {key: plain(value) for key, value in row.items() if key != column}
            found_rows[url.strip()] = Address(number, url.strip(), others)
    return [*found_rows.values()]


# -- Parquet -----------------------------------------------------------------------------------------------------------


_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 64 * MIB
"""Limit on the size of one batch of rows. A single row may hold a video."""


@dataclass(frozen=True)
class ParquetFacts:
    """The metadata in a file's footer."""

    rows: int
    columns: Mapping[str, str]
    """Name -> type, as text."""
    media: tuple[str, ...]
    """The columns that can hold files."""
    largest_group: int
    """Bytes of the largest row group, which must be in memory at once."""


def read_facts(file: BinaryIO, name: str) -> ParquetFacts:
    """Read the footer of a file."""
    parquet, arrow = _libraries(name)
    with _readable(name, arrow):
        found = parquet.ParquetFile(file)
        schema, metadata = found.schema_arrow, found.metadata
        groups = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    return ParquetFacts(
        rows=metadata.num_rows,
        columns={field.name: str(field.type) for field in schema},
        media=tuple(field.name for field in schema if _holds_files(field.type, arrow)),
        largest_group=max(groups, default=0),
    )


def check_columns(dataset: str, facts: ParquetFacts, media: str, others: Mapping[str, str], name: str) -> None:
    """Check that the configured columns exist and that the media column can hold files. Raises CopyError."""
    if media not in facts.columns:
        near = nearest(media, [*facts.columns]) or next(iter(facts.media), None)
        hint = set_option(dataset, "local_copy.media_column", near) if near else "set local_copy.media_column"
        found = f"no column `{media}` in {name}; the columns are {', '.join(facts.columns)}"
        raise CopyError.of(dataset, found=found, expected="a column with the files' bytes", hint=hint)
    if media not in facts.media:
        found = f"column `{media}` of {name} has the type {facts.columns[media]}"
        hint = f"use one of {', '.join(facts.media)}" if facts.media else "for a column of URLs: format: urls"
        raise CopyError.of(dataset, found=found, expected="a column with the files' bytes", hint=hint)
    for column, option in others.items():
        if column not in facts.columns and column.partition(".")[0] not in facts.columns:
            raise CopyError.of_column(dataset, column, option, location=name, supported=facts.columns)


def unpack_parquet(
    path: Path, name: str, writer: PartWriter, *, media: str, filters: Sequence[RowFilter], rows: range | None
) -> None:
    """Write the media of a file to `writer`. `rows` is the range of rows to take; None takes all."""
    parquet, arrow = _libraries(name)
    with _readable(name, arrow):
        file = parquet.ParquetFile(path, memory_map=True)
        schema = file.schema_arrow
        if media not in schema.names:
            found = f"no column `{media}`, which other files have; the columns are {', '.join(schema.names)}"
            raise DamagedPartError(name, found)
        kept = [field.name for field in schema if field.name == media or not _holds_files(field.type, arrow)]
        number = 0
        for batch in file.iter_batches(batch_size=_at_once(path.stat().st_size, file.metadata.num_rows), columns=kept):
            for row in batch.to_pylist():
                if rows is None or number in rows:
                    _unpack_row(row, number, writer, media, filters)
                number += 1
            if rows is not None and number >= rows.stop:
                return


def _at_once(size: int, rows: int) -> int:
    """Rows per batch, from the average size of a row."""
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * max(1, rows) // max(1, size)))


def _unpack_row(row: dict[str, Any], number: int, writer: PartWriter, media: str, filters: Sequence[RowFilter]) -> None:
    if not passes(row, filters):
        writer.leave_out(FILTERED)
        return
    cell = row.pop(media)
    data = media_bytes(cell)
    if isinstance(data, str):
        writer.leave_out(f"{data} in column `{media}`")
        return
    called = cell.get("path") if isinstance(cell, Mapping) else None
    writer.add(f"{number:07d}", data, row, called if isinstance(called, str) else None)


def _holds_files(kind: Any, arrow: Any) -> bool:
    """Whether a column can hold files: binary, or a struct with `bytes`, as the `datasets` library writes media."""
    types = arrow.types
    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_files(field.type, arrow) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _libraries(name: str) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow")
    except ImportError as error:
        found, expected = "a Parquet file, but pyarrow is not installed", "pyarrow, which reads it"
        raise CopyError(Problem(name, found, expected, "pip install 'gracetune[cloud]'")) from error


@contextmanager
def _readable(name: str, arrow: Any) -> Iterator[None]:
    try:
        yield
    except arrow.ArrowException as error:
        raise DamagedPartError(name, f"a damaged Parquet file: {str(error).splitlines()[0]}") from error
