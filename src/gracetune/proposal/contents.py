"""What a folder holds, as a dataset would read it: the same scan, and the same captions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gracetune.config.dataset_config import Captions
from gracetune.config.path_status import inspect_path
from gracetune.data.backend import Backend
from gracetune.data.backends.listing import LeftOut, survey
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.paths import is_hidden
from gracetune.data.captions import open_captions
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.items import kohya_folders, stem_of
from gracetune.data.media import Kind, kind_of
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.media_files import MediaFile
from gracetune.data.scan import scan
from gracetune.errors import ConfigError, Problem
from gracetune.proposal.presets import Media

BEFORE = ("source", "sources", "before", "control", "controls", "input", "inputs", "original", "originals", "reference",
          "references")  # fmt: skip
AFTER = ("target", "targets", "after", "edited", "edit", "edits", "output", "outputs", "result", "results")
"""What people call the two folders of edit pairs."""
_MOST_UNPAIRED = 0.1
"""Of the images in two folders: with more, they are not pairs."""


@dataclass(frozen=True)
class FolderContents:
    """One folder."""

    folder: Path
    """Absolute."""
    media: Media
    trained: Path
    """The files to train on: the folder itself, or of edit pairs the folder of the images after the edit."""
    before: Path | None
    """Of edit pairs."""
    files: tuple[MediaFile, ...]
    unreadable: tuple[LeftOut, ...]
    captions: dict[str, str]
    """Caption by file, of those that have one."""
    passed_over: int
    """Media files of another kind."""

    @property
    def side(self) -> float:
        """The side of a square with as many pixels as the typical image has."""
        sizes = [one.facts for one in self.files if not isinstance(one.facts, AudioFacts)]
        return statistics.median((one.width * one.height) ** 0.5 for one in sizes) if sizes else 0.0

    @property
    def clips(self) -> tuple[VideoFacts, ...]:
        return tuple(one.facts for one in self.files if isinstance(one.facts, VideoFacts))

    @property
    def words(self) -> str:
        """`25 images, 20 with captions`."""
        noun = {"image": "image", "video": "clip", "audio": "sound", "edit": "edit pair"}[self.media]
        count, captioned = len(self.files), len(self.captions)
        captions = {0: "without captions", count: "all with captions"}.get(captioned, f"{captioned} with captions")
        return f"{count} {noun}{'s' * (count != 1)}, {captions}"


def look_at(folder: Path, on_scanned: Callable[[int, int], None] = lambda done, total: None) -> FolderContents:
    """ConfigError where there is nothing to train on."""
    place = inspect_path(folder)
    if place.kind != "folder":
        hint = f"gracetune train {folder}" if place.kind == "file" else "check the spelling"
        raise ConfigError([Problem("FOLDER", f"{folder}, {place.words}", "a folder of images, clips or sounds", hint)])
    root = place.path.absolute()
    kinds = _kinds(LocalBackend(root))
    if not kinds:
        empty = f"{folder}, without images, clips or sounds"
        raise ConfigError(
            [Problem("FOLDER", empty, "a folder of images, clips or sounds", "name the folder they are in")]
        )
    kind = kinds.most_common(1)[0][0]
    pair = _edit_pair(root) if kind == "image" else None
    trained = root if pair is None else pair[1]
    backend = LocalBackend(trained)
    found = scan(backend, kind, on_scanned=on_scanned)
    if not found.files:
        first = found.unreadable[0]
        problem = Problem(
            "FOLDER", f"{first.path}: {first.reason}", "files that can be read", "replace the damaged files"
        )
        raise ConfigError([problem])
    others = sum(kinds.values()) - kinds[kind]
    return FolderContents(
        root, "edit" if pair else kind, trained, pair[0] if pair else None, found.files, found.unreadable,
        _captions(backend, [one.path for one in found.files]), others,
    )  # fmt: skip


def _kinds(backend: Backend) -> Counter[Kind]:
    found: Counter[Kind] = Counter()
    for path in survey(backend).files:
        kind = None if is_hidden(path) else kind_of(path)
        if kind is not None:
            found[kind] += 1
    return found


def _edit_pair(root: Path) -> tuple[Path, Path] | None:
    """Two folders with images of the same names, one of them called as such folders are: before and after."""
    folders = {path.name: path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if len(folders) != 2 or _kinds(LocalBackend(root)).total() != sum(map(_count, folders.values())):
        return None
    for before, after in (tuple(folders), tuple(reversed(folders))):
        if before.lower() in BEFORE or after.lower() in AFTER:
            stems = [_stems(folders[name]) for name in (before, after)]
            unpaired = len(stems[0] ^ stems[1])
            if stems[1] and unpaired <= _MOST_UNPAIRED * len(stems[0] | stems[1]):
                return folders[before], folders[after]
    return None


def _count(folder: Path) -> int:
    return _kinds(LocalBackend(folder)).total()


def _stems(folder: Path) -> set[str]:
    files = survey(LocalBackend(folder)).files
    return {stem_of(path) for path in files if kind_of(path) == "image" and not is_hidden(path)}


def _captions(backend: Backend, paths: list[str]) -> dict[str, str]:
    book = open_captions(Captions(), backend, "captions")
    folders = kohya_folders(paths)
    found = {}
    for path in paths:
        folder = folders.get(path.partition("/")[0])
        try:
            caption = book.find(path, None if folder is None else folder.name).texts[0].strip()
        except UnreadableMediaError:
            continue  # the run names it
        if caption:
            found[path] = caption
    return found
