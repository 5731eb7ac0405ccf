"""Tables in a source: `metadata.csv` and the like in a folder of images, and lists of URLs."""

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
