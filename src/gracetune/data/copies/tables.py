"""Tables beside or instead of media: `metadata.csv` and its like in a folder of pictures, and lists of addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from gracetune.config.dataset_config import Dataset
from gracetune.config.spelling import nearest
from gracetune.data.caption_tables import read_rows, table_kind
from gracetune.data.copies.errors import CopyError
from gracetune.data.copies.rows import FILE_NAME, plain
from gracetune.data.errors import set_option
from gracetune.errors import Problem

METADATA_TABLES: Final = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_USUAL: Final = ("image", "video", "audio")


def is_metadata(path: str) -> bool:
    return PurePosixPath(path).name.lower() in METADATA_TABLES


@dataclass(frozen=True)
class FolderRows:
    """What the tables of a folder say about its files."""

    rows: Mapping[str, Mapping[str, Any]]
    """By the file's path; each has `file_name`, the same path."""
    columns: tuple[str, ...]
    chosen: bool
    """Whether the media column is one of several: then only files that it names are samples."""


def folder_rows(dataset: Dataset, tables: Mapping[str, bytes], media: str | None) -> FolderRows:
    """Rows name their files relative to their table's folder, in `file_name`, or for a column `x` in `x_file_name`."""
    rows: dict[str, Mapping[str, Any]] = {}
    columns: dict[str, None] = {}
    chosen = False
    for path, data in sorted(tables.items()):
        kind = table_kind(path)
        if kind is None:
            continue
        folder = PurePosixPath(path).parent
        for where, row in read_rows(data, kind, path):
            columns.update(dict.fromkeys(row))
            name, of_several = _file_of(row, media)
            if name is None:
                continue
            chosen = chosen or of_several
            file = str(PurePosixPath(*_clean(folder / name.strip().replace("\\", "/"), where)))
            told = {key: plain(value) for key, value in row.items() if not key.endswith(FILE_NAME)}
            rows[file] = {**told, FILE_NAME: file}
    if tables and not rows:
        wanted = f"{media}_{FILE_NAME}" if media else FILE_NAME
        found = f"no column `{wanted}` in {', '.join(tables)}; there is {', '.join(columns)}"
        hint = f"local_copy.media_column may be {_media_columns(columns)}"
        raise CopyError.of(dataset.id, found=found, expected="the files' names", hint=hint)
    return FolderRows(rows, tuple(columns), chosen)


def check_table_columns(dataset: str, columns: Iterable[str], wanted: Mapping[str, str]) -> None:
    """`wanted`: the option that names each column."""
    known = [*columns]
    for column, option in wanted.items():
        if column not in known and column.partition(".")[0] not in known:
            raise CopyError.of_column(dataset, column, option, where="the dataset's tables", known=known)


def _file_of(row: Mapping[str, Any], media: str | None) -> tuple[str | None, bool]:
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


def _clean(path: PurePosixPath, where: str) -> Iterator[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if not parts:
                raise CopyError(Problem(where, f"{path}, which leads out of the dataset", "a file of it", "correct it"))
            parts.pop()
        elif part not in (".", ""):
            parts.append(part)
    yield from parts


# -- lists of addresses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    number: int
    url: str
    row: Mapping[str, Any]


def read_addresses(dataset: str, data: bytes, path: str, column: str) -> list[Address]:
    """One for each address, the last row of several."""
    kind = table_kind(path)
    if kind is None:
        found, expected = f"{path}, which is no table", "a csv, jsonl, json or parquet file with a column of addresses"
        raise CopyError.of(dataset, found=found, expected=expected, hint="check the dataset's path")
    found_rows: dict[str, Address] = {}
    for number, (where, row) in enumerate(read_rows(data, kind, path)):
        if column not in row:
            near = nearest(column, [str(name) for name in row])
            hint = set_option(dataset, "local_copy.media_column", near or next(iter(row), "url"))
            found = f"{where}: no column `{column}`; it has {', '.join(map(str, row))}"
            raise CopyError.of(dataset, found=found, expected="a column of addresses", hint=hint)
        url = row[column]
        if isinstance(url, str) and url.strip():
            others = {key: plain(value) for key, value in row.items() if key != column}
            found_rows[url.strip()] = Address(number, url.strip(), others)
    return [*found_rows.values()]
