"""The folder of one copy, and what it says about itself.

    copy.json       what it is a copy of, the commit or ETags it was made from, and whether it is complete
    parts.jsonl     one line for each finished part: what it was, how it was checked, what became of it
    data/           the dataset as it is read: media, captions, metadata.jsonl
    incoming/       parts that are under way; a transfer goes on from here
    lock            held by the process that makes the copy

A file or folder in `data` appears under its name when it is complete, checked and on the disk. Removing the folder
costs a download, nothing else.
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
from gracetune.storage.append import LineFile
from gracetune.storage.atomic import sweep_folders, write_file
from gracetune.storage.locks import lock, open_lock_file

VERSION: Final = 1
_POLL_SECONDS = 0.2


class Manifest(BaseModel):
    """`copy.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = VERSION
    source: str
    """Without credentials."""
    revision: str | None
    """The commit of a hub's dataset: a copy that was broken off goes on with it."""
    format: CopyFormat
    split: str | None
    complete: bool = False
    parts: int = 0
    samples: int = 0
    files: int = 0
    bytes: int = 0
    left_out: dict[str, int] = {}
    """Why samples of the source are not in the copy, and how many."""


class FinishedPart(BaseModel):
    """A line of `parts.jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: str
    size: int | None
    digest: str | None
    """What its content was checked against; None where the storage tells no digest."""
    tag: str | None
    rows: tuple[int, int] | None = None
    """The first and the last of a part of its rows."""
    at: str
    """Its file or folder below `data`."""
    files: int
    bytes: int
    samples: int
    left_out: dict[str, int] = {}
    columns: tuple[str, ...] = ()

    def is_of(self, part: Part) -> bool:
        """Whether it was made from the file that is there now."""
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
        """Datasets that differ only in what is done with the files share one copy."""
        endpoint = None if dataset.storage is None else dataset.storage.endpoint_url
        what: dict[str, Any] = options.model_dump(mode="json", exclude={"folder"}, exclude_defaults=True)
        what |= {"path": dataset.path, "kind": kind_for(dataset), "type": dataset.dataset_type, "endpoint": endpoint}
        name = re.sub(r"[^\w.-]+", "_", dataset.path.rstrip("/").rpartition("/")[2])[:60].lstrip(".") or "dataset"
        digest = xxhash.xxh3_64_hexdigest(json.dumps(what, sort_keys=True).encode())
        return cls(folder / f"{name}-{digest}")

    def manifest(self) -> Manifest | None:
        """None where there is none that this release can read: then the copy is made anew."""
        try:
            return Manifest.model_validate_json((self.root / "copy.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def write_manifest(self, manifest: Manifest) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        write_file(self.root / "copy.json", manifest.model_dump_json(indent=1).encode())

    def finished(self) -> dict[str, FinishedPart]:
        """By the part's path. A line that a killed process left torn is passed over: its part is made again."""
        found: dict[str, FinishedPart] = {}
        try:
            lines = (self.root / "parts.jsonl").read_bytes().splitlines()
        except OSError:
            return {}
        for line in lines:
            try:
                one = FinishedPart.model_validate_json(line)
            except ValidationError:
                continue
            found[one.part] = one
        return found

    def journal(self) -> LineFile:
        return LineFile(self.root / "parts.jsonl")

    def is_there(self, part: FinishedPart) -> bool:
        """Whether what became of a part is still what it was."""
        place = self.data / part.at
        try:
            if not place.is_dir():
                return place.stat().st_size == part.bytes
        except OSError:
            return False
        return _measure(place, own=False) == (part.files, part.bytes)

    def is_complete(self) -> bool:
        """Whether everything is there: names and sizes, not every byte."""
        manifest = self.manifest()
        if manifest is None or not manifest.complete:
            return False
        files, size = _measure(self.data)
        return (files, size) == (manifest.files, manifest.bytes)

    def measure(self) -> tuple[int, int]:
        return _measure(self.data)

    def start_over(self) -> None:
        """Of another commit, or of a release that writes it otherwise: nothing of it can be used."""
        for path in (self.data, self.incoming):
            shutil.rmtree(path, ignore_errors=True)
        for name in ("copy.json", "parts.jsonl"):
            (self.root / name).unlink(missing_ok=True)

    @contextmanager
    def locked(self, on_wait: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """By one process at a time; the others wait. Where a file system has no locks, nobody waits."""
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
    """Files and bytes of it, without rows and, of a whole copy, without the metadata that was made of them."""
    files = size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            if name.startswith(".") or (own and name == METADATA and Path(where) == folder):
                continue
            try:
                size += os.lstat(f"{where}/{name}").st_size
            except OSError:
                continue
            files += 1
    return files, size
