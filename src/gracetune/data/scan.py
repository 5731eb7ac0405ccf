"""A folder's media as they are: what each file contains, and which cannot be read. Remembered between runs.

What was found is kept in one JSON file per dataset (`SCAN_VERSION` and docs/data.md say what is in it). A file whose
size and time of change are those of the last scan is not opened again; storage that tells no time is always read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from gracetune.config.limits import LARGEST_FILE
from gracetune.data.backend import Backend, FileStat
from gracetune.data.backends.listing import LeftOut, survey
from gracetune.data.backends.paths import is_hidden, suffix_of
from gracetune.data.media import Kind, extension_of, kind_of
from gracetune.data.media_files import MediaFile, facts_as_json, facts_from_json
from gracetune.data.scan_workers import Examined, examine_files
from gracetune.redaction import redact
from gracetune.storage.atomic import write_file

SCAN_VERSION: Final = 2
"""Raised whenever a file would be judged differently than before: old results are then not used."""
_KEYS: Final = {"size", "modified_ns", "digest", "facts"}

OnScanned = Callable[[int, int], None]
"""Told how many files are done, of how many."""


@dataclass(frozen=True)
class Scan:
    """Everything of one kind below a root."""

    files: tuple[MediaFile, ...]
    """Sorted by path."""
    unreadable: tuple[LeftOut, ...]
    left_out: tuple[LeftOut, ...]
    """What the storage does not hand out: links that lead out of the folder, folders that cannot be listed."""
    others: Mapping[str, int]
    """How many files of each further extension there are."""
    reused: int
    """Files that had not changed since the last scan."""
    large: Mapping[str, int]
    """Files of other kinds that are larger than any caption, by their size in bytes."""
    forgotten: str | None = None
    """Why this scan is not remembered, where it should have been. A run works without; its next start is slower."""

    @property
    def total(self) -> int:
        return len(self.files) + len(self.unreadable)


def scan(
    backend: Backend,
    kind: Kind,
    *,
    memory: ScanMemory | None = None,
    extensions: Collection[str] | None = None,
    workers: int = 8,
    on_scanned: OnScanned = lambda done, total: None,
) -> Scan:
    """`extensions` narrows what is looked at, as `in_memory.file_extensions` does."""
    listing = survey(backend)
    wanted = None if extensions is None else {extension.lower().lstrip(".") for extension in extensions}
    media: dict[str, FileStat] = {}
    others: Counter[str] = Counter()
    large: dict[str, int] = {}
    for path, stat in listing.files.items():
        if not is_hidden(path) and kind_of(path) == kind and (wanted is None or extension_of(path) in wanted):
            media[path] = stat
            continue
        others["hidden" if is_hidden(path) else suffix_of(path) or "no extension"] += 1
        if stat.size > LARGEST_FILE:
            large[path] = stat.size
    unselected = [one.path for one in listing.unselected]
    others.update("hidden" if is_hidden(path) else suffix_of(path) or "no extension" for path in unselected)
    known = memory.load() if memory is not None else {}
    results, reused = _look_at(backend, kind, media, known, workers, on_scanned)
    forgotten = None
    if memory is not None:
        # Datasets of the same folder may each look at other files of it: what this one did not ask for is kept.
        there = {*listing.files, *unselected} - media.keys()
        found = {path: known[path] for path in known.keys() & there} | _remembered(media, known, results)
        forgotten = memory.save(found) if found != known else None
    files = tuple(found for found in results.values() if isinstance(found, MediaFile))
    unreadable = tuple(LeftOut(path, found) for path, found in results.items() if isinstance(found, str))
    return Scan(files, unreadable, listing.left_out, dict(others.most_common()), reused, large, forgotten)


def _remembered(
    media: Mapping[str, FileStat], known: Mapping[str, _Remembered], results: Mapping[str, Examined]
) -> dict[str, _Remembered]:
    """Only what was read well: a file that failed may be mended by a chmod, which changes neither size nor time."""
    found = {}
    for path, file in results.items():
        if isinstance(file, MediaFile):
            before = known.get(path)
            # The same object where nothing changed, so that comparing the two costs nothing.
            found[path] = before if before and before.file is file else _Remembered(media[path].modified_ns, file)
    return found


def _look_at(
    backend: Backend,
    kind: Kind,
    media: Mapping[str, FileStat],
    known: Mapping[str, _Remembered],
    workers: int,
    on_scanned: OnScanned,
) -> tuple[dict[str, Examined], int]:
    """What each file is, or why it cannot be read; and how many of them were known from the last time."""
    results: dict[str, Examined] = dict.fromkeys(media, "")
    fresh = []
    for path, stat in media.items():
        before = known.get(path)
        if before and stat.modified_ns and (before.file.size, before.modified_ns) == (stat.size, stat.modified_ns):
            results[path] = before.file
        else:
            fresh.append((path, stat.size))
    reused = len(media) - len(fresh)
    on_scanned(reused, len(media))
    results |= examine_files(
        backend, kind, fresh, threads=workers, on_done=lambda done: on_scanned(reused + done, len(media))
    )
    return results, reused


class _Remembered(NamedTuple):
    """One file in a scan memory."""

    modified_ns: int
    file: MediaFile


class ScanMemory:
    """What the last scan of a folder found, in a file of the run's cache folder."""

    def __init__(self, folder: Path, root: str, kind: Kind) -> None:
        """`root` is the folder that was scanned: datasets of the same one share their scan."""
        self._folder, self._kind = folder, kind
        readable = re.sub(r"[^\w.-]+", "_", redact(root).rstrip("/").rpartition("/")[2])[:60]
        self._name = f"{readable}-{kind}-{xxhash.xxh3_64_hexdigest(root.encode())}.json"

    @property
    def file(self) -> Path:
        return self._folder / self._name

    def load(self) -> dict[str, _Remembered]:
        """Nothing where there is no file, or one that this release would not have written: it is only a memory."""
        try:
            return self._files(json.loads(self.file.read_bytes()))
        except (OSError, ValueError, RecursionError):
            return {}

    def _files(self, content: Any) -> dict[str, _Remembered]:
        """ValueError where it is not what `save` writes. Checked by hand: this is read at every start of a run."""
        if not isinstance(content, dict) or (content.get("version"), content.get("kind")) != (SCAN_VERSION, self._kind):
            raise ValueError("of another release, or of other files")
        files = content.get("files")
        if not isinstance(files, dict):
            raise ValueError("without files")
        return {path: self._file(path, values) for path, values in files.items()}

    def _file(self, path: str, values: Any) -> _Remembered:
        if not isinstance(values, dict) or values.keys() != _KEYS or not isinstance(values["facts"], dict):
            raise ValueError(f"{path} is not described as a file is")
        size, modified_ns, digest = values["size"], values["modified_ns"], values["digest"]
        if type(size) is not int or type(modified_ns) is not int or type(digest) is not str:
            raise ValueError(f"{path}: a size, a time or a digest that is none")
        return _Remembered(modified_ns, MediaFile(path, size, digest, facts_from_json(self._kind, values["facts"])))

    def save(self, files: Mapping[str, _Remembered]) -> str | None:
        """Why it could not be saved, or None."""
        described = {
            path: {
                "size": one.file.size,
                "modified_ns": one.modified_ns,
                "digest": one.file.digest,
                "facts": facts_as_json(one.file.facts),
            }
            for path, one in files.items()
        }
        content = {"version": SCAN_VERSION, "kind": self._kind, "files": described}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            write_file(self._folder / self._name, text.encode())
        except OSError as error:
            return f"{self._folder / self._name} cannot be written: {error.strerror}"
        return None
