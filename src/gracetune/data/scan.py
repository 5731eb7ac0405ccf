"""Scanning a folder: the properties of each media file, and which files are unreadable. Results are kept between runs.

They are stored in one JSON file for each folder and kind of media; docs/data.md describes its content. A file whose
size and modification time have not changed since the last scan is not opened again. Storage without modification times
is always read.
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
from gracetune.data.backend import Backend, FileStat, LeftOut, survey
from gracetune.data.backends.paths import is_hidden, suffix_of
from gracetune.data.media import Kind, extension_of, kind_of
from gracetune.data.media_files import MediaFile, facts_as_json, facts_from_json
from gracetune.data.scan_workers import Examined, examine_files
from gracetune.redaction import redact
from gracetune.storage.atomic import write_file

SCAN_VERSION: Final = 2
"""Increase this whenever files are examined differently than before. Results of other versions are not used."""
_KEYS: Final = {"size", "modified_ns", "digest", "facts"}

OnScanned = Callable[[int, int], None]
"""Called with the number of files scanned and the total."""


@dataclass(frozen=True)
class Scan:
    """All files of one kind below a root."""

    files: tuple[MediaFile, ...]
    """Sorted by path."""
    unreadable: tuple[LeftOut, ...]
    left_out: tuple[LeftOut, ...]
    """What the storage gives no access to: links that lead out of the folder, folders that cannot be listed."""
    others: Mapping[str, int]
    """The number of all other files, by extension with its dot, or under `hidden` and `no extension`."""
    reused: int
    """Files that have not changed since the last scan."""
    oversized: Mapping[str, int]
    """Path -> size in bytes of all other files that are larger than `LARGEST_FILE`, the limit for caption files."""
    save_error: str | None = None
    """Why the results could not be saved. The scan itself is complete, but the next start scans again."""

    @property
    def total(self) -> int:
        return len(self.files) + len(self.unreadable)


def scan(
    backend: Backend,
    kind: Kind,
    *,
    saved: SavedScan | None = None,
    extensions: Collection[str] | None = None,
    workers: int = 8,
    on_scanned: OnScanned = lambda done, total: None,
) -> Scan:
    """Scan all files of one kind. `extensions` limits them, as `in_memory.file_extensions` does.

    `saved` has the results of the last scan, and gets those of this one. None examines every file and saves nothing.
    """
    listing = survey(backend)
    wanted = None if extensions is None else {extension.lower().lstrip(".") for extension in extensions}
    media: dict[str, FileStat] = {}
    others: Counter[str] = Counter()
    oversized: dict[str, int] = {}
    for path, stat in listing.files.items():
        if not is_hidden(path) and kind_of(path) == kind and (wanted is None or extension_of(path) in wanted):
            media[path] = stat
            continue
        others["hidden" if is_hidden(path) else suffix_of(path) or "no extension"] += 1
        if stat.size > LARGEST_FILE:
            oversized[path] = stat.size
    unselected = [one.path for one in listing.unselected]
    others.update("hidden" if is_hidden(path) else suffix_of(path) or "no extension" for path in unselected)
    known = saved.load() if saved is not None else {}
    results, reused = _examine(backend, kind, media, known, workers, on_scanned)
    save_error = None
    if saved is not None:
        # Several datasets of a folder may scan different files of it: keep the results of files not scanned here.
        other_files = {*listing.files, *unselected} - media.keys()
        entries = {path: known[path] for path in known.keys() & other_files} | _entries(media, known, results)
        save_error = saved.save(entries) if entries != known else None
    files = tuple(found for found in results.values() if isinstance(found, MediaFile))
    unreadable = tuple(LeftOut(path, found) for path, found in results.items() if isinstance(found, str))
    return Scan(files, unreadable, listing.left_out, dict(others.most_common()), reused, oversized, save_error)


def _entries(
    media: Mapping[str, FileStat], known: Mapping[str, _SavedEntry], results: Mapping[str, Examined]
) -> dict[str, _SavedEntry]:
    """The results to save. Not of unreadable files, which a chmod can repair without changing their size or time."""
    entries = {}
    for path, file in results.items():
        if isinstance(file, MediaFile):
            before = known.get(path)
            # Keep the same object if nothing changed, so that the comparison with `known` is fast.
            entries[path] = before if before and before.file is file else _SavedEntry(media[path].modified_ns, file)
    return entries


def _examine(
    backend: Backend,
    kind: Kind,
    media: Mapping[str, FileStat],
    known: Mapping[str, _SavedEntry],
    workers: int,
    on_scanned: OnScanned,
) -> tuple[dict[str, Examined], int]:
    """The properties of each file or why it is unreadable, and how many results were reused."""
    results: dict[str, Examined] = dict.fromkeys(media, "")  # fixes the order of the results
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


class _SavedEntry(NamedTuple):
    """One file in the saved results."""

    modified_ns: int
    file: MediaFile


class SavedScan:
    """The saved results of a folder's last scan: a JSON file in the run's cache folder."""

    def __init__(self, folder: Path, root: str, kind: Kind, *, saves: bool = True) -> None:
        """`root` is the scanned folder. Datasets of the same folder share their results."""
        self._folder, self._kind, self._saves = folder, kind, saves
        readable = re.sub(r"[^\w.-]+", "_", redact(root).rstrip("/").rpartition("/")[2])[:60]
        self._name = f"{readable}-{kind}-{xxhash.xxh3_64_hexdigest(root.encode())}.json"

    @property
    def file(self) -> Path:
        return self._folder / self._name

    def load(self) -> dict[str, _SavedEntry]:
        """The saved results; empty if there is no file or its content is not what this release writes."""
        try:
            return self._files(json.loads(self.file.read_bytes()))
        except (OSError, ValueError, RecursionError):
            return {}

    def _files(self, content: Any) -> dict[str, _SavedEntry]:
        """Parse the content. Raises ValueError if `save` did not write it.

        This runs at every start, possibly for a million files, so it checks by hand instead of using pydantic.
        """
        if not isinstance(content, dict) or (content.get("version"), content.get("kind")) != (SCAN_VERSION, self._kind):
            raise ValueError("written by another release, or for other files")
        files = content.get("files")
        if not isinstance(files, dict):
            raise ValueError("there is no `files` object")
        return {path: self._file(path, values) for path, values in files.items()}

    def _file(self, path: str, values: Any) -> _SavedEntry:
        if not isinstance(values, dict) or values.keys() != _KEYS or not isinstance(values["facts"], dict):
            raise ValueError(f"{path}: wrong keys")
        size, modified_ns, digest = values["size"], values["modified_ns"], values["digest"]
        if type(size) is not int or type(modified_ns) is not int or type(digest) is not str:
            raise ValueError(f"{path}: the size, time or digest has a wrong type")
        return _SavedEntry(modified_ns, MediaFile(path, size, digest, facts_from_json(self._kind, values["facts"])))

    def save(self, files: Mapping[str, _SavedEntry]) -> str | None:
        """Save the results. Returns the reason if they could not be written, or None."""
        if not self._saves:
            return None
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
