"""The folder of one copy and the files that describe its state.

    copy.json       the source, its commit, and whether the copy is complete (`CopyManifest`)
    parts.jsonl     one line for each finished part: its source file, its digest and its files (`FinishedPart`)
    data/           the dataset as it is read: media, captions, metadata.jsonl
    incoming/       unfinished parts, from which transfers resume
    lock            locked by the process that makes the copy

A file or folder appears in `data` only when it is complete, checked and flushed to disk. The folder may be removed at
any time; the data is then downloaded again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.config.dataset_config import Dataset, LocalCopy
from gracetune.data.copies.layout import CopyFormat, Part, kind_for
from gracetune.data.copies.rows import METADATA
from gracetune.storage.atomic import LineFile, sweep_folders, write_file
from gracetune.storage.locks import lock, open_lock_file

VERSION: Final = 1
_POLL_SECONDS = 0.2


class CopyManifest(BaseModel):
    """The content of `copy.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = VERSION
    source: str
    """The address, without credentials."""
    revision: str | None
    """The commit of a hub dataset. An interrupted copy continues with it."""
    format: CopyFormat
    split: str | None
    complete: bool = False
    """All counts that follow are 0 until then."""
    parts: int = 0
    samples: int = 0
    files: int = 0
    bytes: int = 0
    left_out: dict[str, int] = {}
    """The reasons why samples of the source are not in the copy, with their counts."""


class FinishedPart(BaseModel):
    """A line of `parts.jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: str
    """The path of its file at the source."""
    size: int | None
    """Bytes of that file; None if the storage does not report them."""
    digest: str | None
    """The digest its content was checked against; None if the storage reports none."""
    tag: str | None
    rows: tuple[int, int] | None = None
    """Start and end of the range of rows that was taken; None for all rows."""
    at: str
    """Its file or folder below `data`."""
    files: int
    bytes: int
    """Size of these files in the copy."""
    samples: int
    left_out: dict[str, int] = {}
    columns: tuple[str, ...] = ()

    def is_of(self, part: Part) -> bool:
        """Whether it was made from the current version of the source file."""
        remote = part.remote
        rows = None if part.rows is None else (part.rows.start, part.rows.stop)
        return (self.size, self.digest, self.tag, self.rows) == (remote.size, remote.digest, remote.tag, rows)


class CopyFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.incoming = root / "incoming"

    @classmethod
    def of(cls, dataset: Dataset, options: LocalCopy, folder: Path) -> CopyFolder:
        """The folder of a dataset's copy. Datasets that differ only in how the files are used share one."""
        endpoint = None if dataset.storage is None else dataset.storage.endpoint_url
        # The name holds a digest of everything that decides the copy's content.
        key: dict[str, Any] = options.model_dump(mode="json", exclude={"folder"}, exclude_defaults=True)
        key |= {"path": dataset.path, "kind": kind_for(dataset), "type": dataset.dataset_type, "endpoint": endpoint}
        name = re.sub(r"[^\w.-]+", "_", dataset.path.rstrip("/").rpartition("/")[2])[:60].lstrip(".") or "dataset"
        digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
        return cls(folder / f"{name}-{digest}")

    def manifest(self) -> CopyManifest | None:
        """The manifest; None if there is none that this release can read. The copy then starts over."""
        try:
            return CopyManifest.model_validate_json((self.root / "copy.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def write_manifest(self, manifest: CopyManifest) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        write_file(self.root / "copy.json", manifest.model_dump_json(indent=1).encode())

    def finished(self) -> dict[str, FinishedPart]:
        """The finished parts by path. An incomplete line of a killed process is skipped, and its part made again."""
        found: dict[str, FinishedPart] = {}
        try:
            lines = (self.root / "parts.jsonl").read_bytes().splitlines()
        except OSError:
            return {}
        for line in lines:
            try:
                part = FinishedPart.model_validate_json(line)
            except ValidationError:
                continue
            found[part.part] = part
        return found

    def journal(self) -> LineFile:
        return LineFile(self.root / "parts.jsonl")

    def has_part(self, part: FinishedPart) -> bool:
        """Whether a part's files exist with the recorded count and size."""
        path = self.data / part.at
        try:
            if not path.is_dir():
                return path.stat().st_size == part.bytes
        except OSError:
            return False
        return _measure(path, own=False) == (part.files, part.bytes)

    def is_complete(self) -> bool:
        """Whether the copy is complete. Compares the number and size of files, not their content."""
        manifest = self.manifest()
        if manifest is None or not manifest.complete:
            return False
        files, size = _measure(self.data)
        return (files, size) == (manifest.files, manifest.bytes)

    def measure(self) -> tuple[int, int]:
        """The number of files in the copy and their size in bytes."""
        return _measure(self.data)

    def start_over(self) -> None:
        """Remove everything: the content is from another commit or another release and cannot be used."""
        for path in (self.data, self.incoming):
            shutil.rmtree(path, ignore_errors=True)
        for name in ("copy.json", "parts.jsonl"):
            (self.root / name).unlink(missing_ok=True)

    @contextmanager
    def locked(self, on_wait: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Hold the folder's lock. Other processes wait, except on file systems without locks.

        Folders that killed processes were unpacking are removed first; partly transferred files are kept.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock_file(self.root / "lock")
        try:
            waited = False
            while lock(descriptor, exclusive=True) == "busy":
                if not waited:
                    on_wait(f"another process is making the copy in {self.root}; waiting for it")
                waited = True
                time.sleep(_POLL_SECONDS)
            if self.incoming.is_dir():
                sweep_folders(self.incoming)
            yield
        finally:
            os.close(descriptor)


def _measure(folder: Path, *, own: bool = True) -> tuple[int, int]:
    """The number and size of files, without hidden files of rows.

    With `own`, for a whole copy, the generated `metadata.jsonl` is left out too.
    """
    files = size = 0
    for folder_path, _, names in os.walk(folder):
        for name in names:
            if name.startswith(".") or (own and name == METADATA and Path(folder_path) == folder):
                continue
            try:
                size += os.lstat(f"{folder_path}/{name}").st_size
            except OSError:
                continue
            files += 1
    return files, size
