"""Unpacking media from Parquet files: one media file per row, and the other columns as its row of metadata."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gracetune.config.dataset_config import RowFilter
from gracetune.config.spelling import nearest
from gracetune.data.copies.errors import CopyError, DamagedPartError
from gracetune.data.copies.rows import FILTERED, PartWriter, media_bytes, passes
from gracetune.data.errors import set_option
from gracetune.errors import Problem
from gracetune.units import MIB

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
