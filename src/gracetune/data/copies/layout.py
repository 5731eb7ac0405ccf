"""The layout of a copy: the format of the source, the files of the chosen split, and which of their rows are wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gracetune.config.dataset_config import Dataset, LocalCopy
from gracetune.data.backend import FileStat, Listing
from gracetune.data.backends.paths import is_hidden, rejection
from gracetune.data.caption_tables import table_kind
from gracetune.data.copies.archives import is_archive
from gracetune.data.copies.errors import CopyError
from gracetune.data.copies.rows import stem_of
from gracetune.data.copies.sources import CopySource, open_file
from gracetune.data.copies.splits import SplitError, SplitPart, parse_split, read_card, splits_of
from gracetune.data.copies.tables import is_metadata
from gracetune.data.errors import set_option
from gracetune.data.media import Kind, kind_of
from gracetune.data.staging.file_selection import MEDIA, SIDECARS, selection_for
from gracetune.storage.transfer import RemoteFile

CopyFormat = Literal["files", "parquet", "archives", "urls"]
UNPACKED: Final = "unpacked"
"""The folder for everything unpacked from tables and archives. With it, no name in a source can look like one of
kohya's numbered top-level folders."""
_LARGEST_CARD = 4 << 20


@dataclass(frozen=True)
class Part:
    """One file of the source."""

    path: str
    remote: RemoteFile
    rows: range | None = None
    """The rows to take; None takes all."""

    @property
    def folder(self) -> str:
        """The folder its content is unpacked to, below the copy's `data`."""
        return f"{UNPACKED}/{stem_of(self.path)}"


@dataclass(frozen=True)
class SourceLayout:
    format: CopyFormat
    parts: tuple[Part, ...]
    """The files with the samples, in order."""
    beside: tuple[Part, ...] = ()
    """Captions and tables next to them."""
    slices: tuple[tuple[SplitPart, tuple[str, ...]], ...] = field(default=(), repr=False)
    """The parts of a split with their files, if the split is not taken whole."""

    @property
    def size(self) -> int:
        """Bytes of all files at the source. Files of unknown size count as 0."""
        return sum(part.remote.size or 0 for part in (*self.parts, *self.beside))


def kind_for(dataset: Dataset) -> Kind:
    """The kind of media to take from tables and archives."""
    return dataset.dataset_type if dataset.dataset_type in ("video", "audio") else "image"


def media_column(dataset: Dataset, options: LocalCopy) -> str:
    return options.media_column or ("url" if options.format == "urls" else kind_for(dataset))


def lay_out(dataset: Dataset, options: LocalCopy, source: CopySource) -> SourceLayout:
    """Choose the files to copy from the source's listing."""
    files = {path: file for path, file in source.files().items() if not is_hidden(path) and rejection(path) is None}
    found = options.format if options.format != "auto" else _detect(dataset, files)
    candidates = _candidates(dataset, found, files)
    if not candidates:
        raise _nothing(dataset, found, files)
    if found == "urls":
        return SourceLayout("urls", tuple(Part(path, files[path]) for path in candidates))
    chosen = _of_split(dataset, options, source, candidates)
    wanted = dict.fromkeys(path for _, paths in chosen for path in paths)
    whole = all(part.is_whole for part, _ in chosen)
    layout = SourceLayout(
        found, tuple(Part(path, files[path]) for path in wanted), tuple(_beside(dataset, found, files, wanted)),
        () if whole else chosen,
    )  # fmt: skip
    if layout.slices and found == "files":
        return _sliced(layout, dict.fromkeys(wanted, 1))
    if layout.slices and found == "archives":
        expected = "a whole split: the number of samples in an archive is known only after unpacking"
        raise CopyError.of(dataset.id, found=f"split {options.split}", expected=expected, hint="remove the brackets")
    return layout


def with_rows(layout: SourceLayout, counts: Mapping[str, int]) -> SourceLayout:
    """Resolve a sliced split of tables once their row counts are known. Files without wanted rows are dropped."""
    return _sliced(layout, counts) if layout.slices else layout


def _sliced(layout: SourceLayout, counts: Mapping[str, int]) -> SourceLayout:
    rows: dict[str, range] = {}
    for part, paths in layout.slices:
        # `wanted` counts rows over all files of the split; `first` is the number of the file's first row in it.
        wanted, first = part.bounds(sum(counts[path] for path in paths)), 0
        for path in paths:
            own = range(max(0, wanted.start - first), min(counts[path], wanted.stop - first))
            if len(own):
                rows[path] = own
            first += counts[path]
    kept = tuple(
        Part(part.path, part.remote, rows[part.path] if layout.format == "parquet" else None)
        for part in layout.parts
        if part.path in rows
    )
    return SourceLayout(layout.format, kept, layout.beside)


def _detect(dataset: Dataset, files: Mapping[str, RemoteFile]) -> CopyFormat:
    """The format with the most bytes. A dataset of tables may have a few images, and one of images may have a table."""
    table = dataset.captions.table
    own = None if table is None else table.path
    sizes: dict[CopyFormat, int] = {"files": 0, "parquet": 0, "archives": 0}
    media = frozenset[str]().union(*MEDIA.values())
    for path, file in files.items():  # each counts one byte more, so that files of unknown size count too
        suffix = f".{path.rpartition('.')[2].lower()}"
        if is_archive(path):
            sizes["archives"] += 1 + (file.size or 0)
        elif suffix == ".parquet" and not is_metadata(path) and path != own:
            sizes["parquet"] += 1 + (file.size or 0)
        elif suffix in media:
            sizes["files"] += 1 + (file.size or 0)
    return max(sizes, key=lambda name: sizes[name])


def _candidates(dataset: Dataset, found: CopyFormat, files: Mapping[str, RemoteFile]) -> list[str]:
    """The files of this format that may hold samples."""
    if found == "parquet":
        return [path for path in files if path.lower().endswith(".parquet") and not is_metadata(path)]
    if found == "archives":
        return [path for path in files if is_archive(path)]
    if found == "urls":
        return [path for path in files if table_kind(path) is not None][:1]
    media = selection_for(dataset).media
    return [path for path in files if kind_of(path) is not None and f".{path.rpartition('.')[2].lower()}" in media]


def _beside(
    dataset: Dataset, found: CopyFormat, files: Mapping[str, RemoteFile], chosen: Collection[str]
) -> Iterable[Part]:
    """Captions and tables next to the chosen files, or the index files of archives."""
    if found == "files":
        selected = selection_for(dataset).apply(Listing(dict.fromkeys(files, FileStat(0, 0)))).files
        extension = f".{dataset.captions.extension.lstrip('.').lower()}"
        for path in selected:
            suffix = f".{path.rpartition('.')[2].lower()}"
            if path not in chosen and (suffix in SIDECARS or suffix == extension) and not _is_shard(path):
                yield Part(path, files[path])
    if found == "archives":
        indexes = {f"{stem_of(path)}.json" for path in chosen}
        yield from (Part(path, files[path]) for path in files if path in indexes)


def _is_shard(path: str) -> bool:
    return path.lower().endswith(".parquet") and not is_metadata(path) and "-of-" in path


def _of_split(
    dataset: Dataset, options: LocalCopy, source: CopySource, candidates: list[str]
) -> tuple[tuple[SplitPart, tuple[str, ...]], ...]:
    """The files of each part of the split. Hub datasets default to `train`; other storage has no splits by default."""
    on_hub = dataset.path.startswith("hf://")
    if options.split is None and not on_hub:
        return ((SplitPart("train"), tuple(sorted(candidates))),)
    try:
        card = _card(source) if on_hub else {}
        splits = splits_of(candidates, card, options.subset)
        parts = parse_split(options.split or "train")
        for part in parts:
            if not splits.get(part.name):
                found = f"no split {part.name} in {source.address}"
                first = next(iter(splits), "train")
                raise SplitError(found, f"one of {', '.join(splits)}", "local_copy.split", first)
    except SplitError as error:
        hint = set_option(dataset.id, error.option, error.value)
        raise CopyError.of(dataset.id, found=error.found, expected=error.expected, hint=hint) from error
    return tuple((part, tuple(splits[part.name])) for part in parts)


def _card(source: CopySource) -> Mapping[str, Any]:
    if "README.md" not in source.files():
        return {}
    with source.explained(), open_file(source, "README.md") as file:
        return read_card(file.read(_LARGEST_CARD).decode("utf-8", errors="replace"))


def _nothing(dataset: Dataset, found: str, files: Mapping[str, RemoteFile]) -> CopyError:
    counts: dict[str, int] = {}
    for path in files:
        ending = f".{path.rpartition('.')[2].lower()}" if "." in path.rpartition("/")[2] else "no extension"
        counts[ending] = counts.get(ending, 0) + 1
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda one: -one[1])[:5])
    wanted = {"parquet": ".parquet files", "archives": "tar or zip archives", "urls": "a table"}
    return CopyError.of(
        dataset.id,
        found=f"no {wanted.get(found, f'{kind_for(dataset)} files')} in {dataset.path}: "
        + (f"it holds {listed}" if listed else "it is empty"),
        expected=f"{kind_for(dataset)} files, Parquet tables or archives of them",
        hint="check the dataset's path, its dataset_type and local_copy.format",
    )
