"""Selecting the files of a folder that a dataset needs in memory: its media and the files that may describe them.

Captions, tables and other sidecars are selected by extension, whether or not a media file of the same name is selected:
they are small, and the code that reads captions decides later what belongs together. Hidden files are excluded: macOS
writes a `._photo.jpg` next to every photo it copies. The staging report counts the files that are not staged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gracetune.data.backend import LeftOut, Listing
from gracetune.data.backends.paths import is_hidden, suffix_of
from gracetune.data.media import EXTENSIONS, Kind

if TYPE_CHECKING:
    from gracetune.config.dataset_config import Dataset


def dotted(extension: str) -> str:
    """Normalize an extension: `JPG`, `.jpg` and `*.jpg` become `.jpg`."""
    return "." + extension.strip().lower().lstrip("*").lstrip(".")


MEDIA: Final = {kind: frozenset(map(dotted, names)) for kind, names in EXTENSIONS.items()}
SIDECARS: Final = frozenset([
    ".txt", ".caption", ".cap", ".tags", ".srt", ".vtt",
    ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".yaml", ".yml", ".toml", ".xml",
])  # fmt: skip

_OF_DATASET: Final[dict[str, tuple[Kind, ...]]] = {
    "image": ("image",),
    "eval": ("image", "video", "audio"),
    "video": ("video", "image", "audio"),  # first frames, masks and soundtracks are stored next to the clips
    "audio": ("audio",),
    "conditioning": ("image", "video", "audio"),
}


@dataclass(frozen=True)
class ExtensionSelection:
    """The extensions to stage, in lower case with their dot."""

    media: frozenset[str]
    sidecars: frozenset[str] = SIDECARS

    def apply(self, listing: Listing) -> Listing:
        """The listing reduced to the selected files. The others are in `unselected` with the reason."""
        unselected = []
        chosen = {}
        for path, facts in listing.files.items():
            reason = self._rejection(path)
            if reason is None:
                chosen[path] = facts
            else:
                unselected.append(LeftOut(path, reason))
        return Listing(chosen, listing.left_out, tuple(unselected))

    def covers(self, other: ExtensionSelection) -> bool:
        """Whether this selects every file that the other selects."""
        return other.media <= self.media | self.sidecars and other.sidecars <= self.media | self.sidecars

    def _rejection(self, path: str) -> str | None:
        if is_hidden(path):
            return "hidden: a name that starts with a dot"
        suffix = suffix_of(path)
        if suffix in self.media or suffix in self.sidecars:
            return None
        return f"not staged: {suffix or 'no extension'} is neither a selected media type nor a sidecar"


def select(
    media: Iterable[Kind], *, extensions: Iterable[str] | None = None, also: Iterable[str] = ()
) -> ExtensionSelection:
    """Select media by kind, or by `extensions` instead. Sidecars and the extensions in `also` are always selected."""
    if extensions is None:
        chosen = frozenset[str]().union(*(MEDIA[kind] for kind in media))
    else:
        chosen = frozenset(map(dotted, extensions))
    return ExtensionSelection(chosen, SIDECARS | frozenset(map(dotted, also)))


def selection_for(dataset: Dataset) -> ExtensionSelection:
    """The files that a dataset needs."""
    captions = dataset.captions
    also = [captions.extension.rpartition(".")[2]]  # only the last part of `tags.md`, as `suffix_of` returns it
    if captions.table is not None and suffix_of(captions.table.path):
        also.append(suffix_of(captions.table.path))
    return select(_OF_DATASET[dataset.dataset_type], extensions=dataset.in_memory.file_extensions, also=also)


def reasons(left_out: Iterable[LeftOut]) -> list[tuple[str, int]]:
    """Each distinct reason with its count, the most frequent first."""
    return Counter(item.reason for item in left_out).most_common()
