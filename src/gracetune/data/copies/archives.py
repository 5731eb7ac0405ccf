"""Unpacking media from tar and zip archives, including WebDataset shards.

The members of a sample share their name up to the first dot: `000012.jpg`, `000012.txt`, `000012.json`. A text member
becomes a column named after its extension; each key of a JSON object becomes a column. The index that webshart writes
next to a shard (`shard.json`, captions by file name) is read too. A sample without a `caption` column gets one from
`captions` or `txt`.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from gracetune.config.dataset_config import RowFilter
from gracetune.data.backends.paths import is_hidden, rejection, suffix_of
from gracetune.data.copies.errors import DamagedPartError
from gracetune.data.copies.rows import FILTERED, PartWriter, passes, stem_of
from gracetune.data.media import Kind, kind_of
from gracetune.data.staging.file_selection import SIDECARS

ENDINGS: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError)
_LARGEST_SIDECAR = 16 << 20
_TEXT: Final = frozenset([".txt", ".caption", ".cap", ".tags"])


def is_archive(path: str) -> bool:
    return path.lower().endswith(ENDINGS)


def unpack_archive(
    path: Path,
    name: str,
    writer: PartWriter,
    *,
    kind: Kind,
    media: str | None,
    filters: Sequence[RowFilter],
    index: Mapping[str, Any] | None = None,
) -> None:
    """Write all samples of an archive to `writer`. Raises DamagedPartError with the member if the archive is damaged.

    `media` is the extension of the wanted media, which is how WebDataset names columns; None takes all of the kind.
    `index` holds data about members from an index file.
    """
    group = _Group("")
    last = "its beginning"
    try:
        for member, read in _members(path):
            last = member
            if is_hidden(member) or rejection(member) is not None:
                writer.leave_out("a member that is hidden or leads out of the archive")
                continue
            folder, _, file = member.rpartition("/")
            key = f"{folder}/{file.partition('.')[0]}".removeprefix("/")
            if key != group.key:
                _finish(group, writer, filters, index or {})
                group = _Group(key)
            _take(group, member, read, writer, kind, media)
    except _DAMAGED as error:
        if (
            isinstance(error, OSError)
            and error.errno is not None
            and not isinstance(error, EOFError | tarfile.TarError)
        ):
            raise  # an error of this machine's disk, not of the archive
        raise DamagedPartError(
            name, f"a damaged archive, at or after {last}: {error or type(error).__name__}"
        ) from error
    _finish(group, writer, filters, index or {})


def read_index(data: bytes) -> Mapping[str, Any]:
    """The data about each member in webshart's index of a shard; empty if the file is not such an index."""
    try:
        files = json.loads(data or b"{}").get("files")
    except (ValueError, AttributeError):
        return {}
    return {name: value for name, value in files.items() if isinstance(value, dict)} if isinstance(files, dict) else {}


@dataclass
class _Group:
    """The members of one sample."""

    key: str

    def __post_init__(self) -> None:
        self.media: list[tuple[str, bytes]] = []
        self.row: dict[str, Any] = {}
        self.sidecars: list[tuple[str, bytes]] = []


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The archive's files in order. Read each before taking the next."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as file:
                        yield info.filename.removeprefix("./"), file
        return
    with tarfile.open(path) as tar:
        opened: Any = tar
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.removeprefix("./"), content
            opened.members.clear()  # tarfile would keep all members in memory, and a shard may have a million
        # tarfile treats a damaged header as the end of the archive. A real end is a block of zeros.
        opened.fileobj.seek(opened.offset)
        if opened.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"no valid header at byte {opened.offset:,}")


def _take(
    group: _Group, member: str, file: IO[bytes], writer: PartWriter, kind: Kind, media: str | None
) -> None:  # fmt: skip
    """Add a member to its sample."""
    suffix, column = suffix_of(member), member.rpartition("/")[2].partition(".")[2]
    if kind_of(member) == kind:
        if media is None or media == column:
            group.media.append((member, file.read()))
    elif suffix == ".json":
        data = file.read(_LARGEST_SIDECAR)
        try:
            value = json.loads(data)
        except ValueError:
            writer.leave_out("a .json member that is not valid JSON")
            return
        group.row |= value if isinstance(value, dict) else {"json": value}
    elif suffix in SIDECARS:
        data = file.read(_LARGEST_SIDECAR)
        group.sidecars.append((member, data))
        if suffix in _TEXT:
            group.row[column] = data.decode("utf-8", errors="replace").strip()


def _finish(group: _Group, writer: PartWriter, filters: Sequence[RowFilter], index: Mapping[str, Any]) -> None:
    """Write a complete sample."""
    for member, data in group.media:
        known = index.get(member) or index.get(member.rpartition("/")[2]) or {}
        row = {
            **{name: value for name, value in known.items() if name not in ("offset", "length", "size")},
            **group.row,
        }
        row.setdefault("caption", row.get("captions", row.get("txt")))
        if passes(row, filters):
            writer.add(stem_of(member), data, row, member)
        else:
            writer.leave_out(FILTERED)
    for member, data in group.sidecars:
        writer.add_file(member, data)
