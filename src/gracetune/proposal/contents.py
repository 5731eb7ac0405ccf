"""Inspect a folder with the same scan and caption rules as a dataset."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gracetune.config.dataset_config import Captions
from gracetune.config.path_status import inspect_path
from gracetune.data.backend import Backend, LeftOut, survey
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
"""Common names of the two folders of edit pairs, `BEFORE` and `AFTER`."""
_MOST_UNPAIRED = 0.1
"""Largest share of images without a partner; above it, two folders do not count as edit pairs."""


@dataclass(frozen=True)
class FolderContents:
    """The contents of one folder."""

    folder: Path
    """Absolute path."""
    media: Media
    trained: Path
    """The folder to train on: `folder` itself, or for edit pairs the folder with the images after the edit."""
    before: Path | None
    """For edit pairs: the folder with the images before the edit."""
    files: tuple[MediaFile, ...]
    unreadable: tuple[LeftOut, ...]
    captions: dict[str, str]
    """Captions by path. Files without a caption have no entry."""
    ignored: int
    """Number of media files of another kind, which are ignored."""

    @property
    def median_side(self) -> float:
        """The side of a square with as many pixels as the median image; 0 for audio."""
        sizes = [file.facts for file in self.files if not isinstance(file.facts, AudioFacts)]
        return statistics.median((size.width * size.height) ** 0.5 for size in sizes) if sizes else 0.0

    @property
    def clips(self) -> tuple[VideoFacts, ...]:
        return tuple(one.facts for one in self.files if isinstance(one.facts, VideoFacts))

    @property
    def summary(self) -> str:
        """A summary, such as `25 images, 20 with captions`."""
        noun = {"image": "image", "video": "clip", "audio": "sound", "edit": "edit pair"}[self.media]
        count, captioned = len(self.files), len(self.captions)
        captions = {0: "without captions", count: "all with captions"}.get(captioned, f"{captioned} with captions")
        return f"{count} {noun}{'s' * (count != 1)}, {captions}"


def inspect_folder(folder: Path, on_scanned: Callable[[int, int], None] = lambda done, total: None) -> FolderContents:
    """Inspect `folder`. Raises ConfigError if there is nothing to train on."""
    place = inspect_path(folder)
    if place.kind != "folder":
        hint = f"gracetune train {folder}" if place.kind == "file" else "check the spelling"
        raise ConfigError([Problem("FOLDER", f"{folder}, {place.words}", "a folder of images, clips or sounds", hint)])
    root = place.path.absolute()
    kinds = _kinds(LocalBackend(root))
    if not kinds:
        empty = f"{folder}, without images, clips or sounds"
        raise ConfigError(
            [Problem("FOLDER", empty, "a folder of images, clips or sounds", "pass the folder that contains them")]
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


def holds_media(folder: Path) -> bool:
    """Whether the folder or one below it has images, clips or sounds, damaged ones too."""
    return bool(_kinds(LocalBackend(folder)))


def _kinds(backend: Backend) -> Counter[Kind]:
    found: Counter[Kind] = Counter()
    for path in survey(backend).files:
        kind = None if is_hidden(path) else kind_of(path)
        if kind is not None:
            found[kind] += 1
    return found


def _edit_pair(root: Path) -> tuple[Path, Path] | None:
    """The folders (before, after), if `root` holds just two folders of equally named images and a common name for
    one.
    """
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
            continue  # training reports it
        if caption:
            found[path] = caption
    return found
