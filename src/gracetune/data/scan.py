"""A folder's media as they are: what each file contains, and which cannot be read. Remembered between runs.

What was found is kept in one JSON file per dataset (`SCAN_VERSION` and docs/data.md say what is in it). A file whose
size and time of change are those of the last scan is not opened again; storage that tells no time is always read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.data.backend import Backend, FileStat
from gracetune.data.backends.listing import LeftOut, survey
from gracetune.data.backends.paths import is_hidden, suffix_of
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.data.media import Kind, extension_of, kind_of
from gracetune.data.media.probe import AudioFacts, ImageFacts, VideoFacts, probe_audio, probe_image, probe_video
from gracetune.data.truncation import truncation
from gracetune.redaction import redact
from gracetune.storage.atomic import write_file

SCAN_VERSION: Final = 2
"""Raised whenever a file would be judged differently than before: old results are then not used."""
_CHUNK = 1 << 20

Facts = ImageFacts | VideoFacts | AudioFacts
OnScanned = Callable[[int, int], None]
"""Told how many files are done, of how many."""


@dataclass(frozen=True)
class MediaFile:
    """A file that can be read, as far as its beginning tells."""

    path: str
    size: int
    """Bytes."""
    digest: str
    """xxh3-128 of the content, hex."""
    facts: Facts


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
    forgotten: str | None = None
    """Why this scan is not remembered, where it should have been. A run works without; its next start is slower."""

    @property
    def total(self) -> int:
        return len(self.files) + len(self.unreadable)


@runtime_checkable
class Digesting(Protocol):
    """A backend that already knows what its files' digests are: staged data."""

    def digest(self, path: str) -> str | None: ...


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
    for path, stat in listing.files.items():
        if is_hidden(path):
            others["hidden"] += 1
        elif kind_of(path) == kind and (wanted is None or extension_of(path) in wanted):
            media[path] = stat
        else:
            others[suffix_of(path) or "no extension"] += 1
    unselected = [one.path for one in listing.unselected]
    others.update("hidden" if is_hidden(path) else suffix_of(path) or "no extension" for path in unselected)
    known = memory.load() if memory is not None else {}
    results, reused = _look_at(backend, kind, media, known, workers, on_scanned)
    forgotten = None
    if memory is not None:
        # Datasets of the same folder may each look at other files of it: what this one did not ask for is kept.
        there = {*listing.files, *unselected} - media.keys()
        found = {path: known[path] for path in known.keys() & there} | _remembered(media, results)
        forgotten = memory.save(found) if found != known else None
    files = tuple(found for found in results.values() if isinstance(found, MediaFile))
    unreadable = tuple(LeftOut(path, found) for path, found in results.items() if isinstance(found, str))
    return Scan(files, unreadable, listing.left_out, dict(others.most_common()), reused, forgotten)


def _remembered(media: Mapping[str, FileStat], results: Mapping[str, MediaFile | str]) -> dict[str, _Remembered]:
    """Only what was read well: a file that failed may be mended by a chmod, which changes neither size nor time."""
    return {
        path: _Remembered.from_result(media[path], found)
        for path, found in results.items()
        if isinstance(found, MediaFile)
    }


def _look_at(
    backend: Backend,
    kind: Kind,
    media: Mapping[str, FileStat],
    known: Mapping[str, _Remembered],
    workers: int,
    on_scanned: OnScanned,
) -> tuple[dict[str, MediaFile | str], int]:
    """What each file is, or why it cannot be read; and how many of them were known from the last time."""
    results: dict[str, MediaFile | str] = dict.fromkeys(media, "")
    fresh = []
    for path, stat in media.items():
        remembered = known.get(path)
        if remembered is not None and stat.modified_ns and remembered.stat == stat:
            results[path] = remembered.of(path)
        else:
            fresh.append(path)
    reused = len(media) - len(fresh)
    on_scanned(reused, len(media))
    with ThreadPoolExecutor(workers, thread_name_prefix="scan") as pool:
        looked_at = pool.map(lambda path: examine(backend, path, kind, media[path].size), fresh)
        for done, (path, found) in enumerate(zip(fresh, looked_at, strict=True), start=reused + 1):
            results[path] = found
            on_scanned(done, len(media))
    return results, reused


def examine(backend: Backend, path: str, kind: Kind, size: int) -> MediaFile | str:
    """One file, opened and read: its facts and digest, or what is wrong with it."""
    try:
        if kind == "image":
            facts: Facts = probe_image(backend, path)
            data = backend.read(path)
            missing = truncation(data)
            if missing is not None:
                return missing
            return MediaFile(path, size, _known_digest(backend, path) or xxhash.xxh3_128_hexdigest(data), facts)
        facts = probe_video(backend, path) if kind == "video" else probe_audio(backend, path)
        return MediaFile(path, size, _known_digest(backend, path) or _streamed_digest(backend, path), facts)
    except UnreadableMediaError as error:
        return error.reason
    except MissingFileError:
        return "it was gone before it could be read"


def _known_digest(backend: Backend, path: str) -> str | None:
    return backend.digest(path) if isinstance(backend, Digesting) else None


def _streamed_digest(backend: Backend, path: str) -> str:
    """A video may be larger than a thread should hold in memory."""
    digest = xxhash.xxh3_128()
    with backend.open(path) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class _Remembered(BaseModel):
    """One file in a scan memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    modified_ns: int
    digest: str
    facts: Facts

    def of(self, path: str) -> MediaFile:
        return MediaFile(path, self.size, self.digest, self.facts)

    @property
    def stat(self) -> FileStat:
        return FileStat(self.size, self.modified_ns)

    @classmethod
    def from_result(cls, stat: FileStat, found: MediaFile) -> _Remembered:
        return cls(size=stat.size, modified_ns=stat.modified_ns, digest=found.digest, facts=found.facts)


class _ScanFile(BaseModel):
    version: Literal[2]
    kind: Kind
    files: dict[str, _Remembered]


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
            return _ScanFile.model_validate_json(self.file.read_bytes()).files
        except (OSError, ValidationError):
            return {}

    def save(self, files: dict[str, _Remembered]) -> str | None:
        """Why it could not be saved, or None."""
        content = _ScanFile(version=SCAN_VERSION, kind=self._kind, files=files)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._folder / self._name, content.model_dump_json(exclude_defaults=True).encode())
        except OSError as error:
            return f"{self._folder / self._name} cannot be written: {error.strerror}"
        return None
