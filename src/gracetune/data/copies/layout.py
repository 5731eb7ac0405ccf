"""What of a source a copy is made of: its format, the files of the split, and which of their rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gracetune.config.dataset_config import Dataset, LocalCopy
from gracetune.data.backend import FileStat
from gracetune.data.backends.listing import Listing
from gracetune.data.backends.paths import is_hidden, refusal
from gracetune.data.caption_tables import table_kind
from gracetune.data.copies.archives import is_archive
from gracetune.data.copies.errors import CopyError
from gracetune.data.copies.rows import stem_of
from gracetune.data.copies.sources import CopySource, open_file
from gracetune.data.copies.splits import SplitError, SplitPart, parse_split, read_card, splits_of
from gracetune.data.copies.tables import is_metadata
from gracetune.data.errors import set_option
from gracetune.data.media import Kind, kind_of
from gracetune.data.staging.selection import MEDIA, SIDECARS, selection_for
from gracetune.storage.transfer import RemoteFile

CopyFormat = Literal["files", "parquet", "archives", "urls"]
UNPACKED: Final = "unpacked"
"""The folder of everything that was taken out of tables and archives: no name of a source can stand for kohya's."""
_LARGEST_CARD = 4 << 20


@dataclass(frozen=True)
class Part:
    """One file of the source."""

    path: str
    remote: RemoteFile
    rows: range | None = None
    """Which of its rows are wanted; None means all."""

    @property
    def folder(self) -> str:
        """Where what is unpacked of it goes, below the copy's root."""
        return f"{UNPACKED}/{stem_of(self.path)}"


@dataclass(frozen=True)
class Layout:
    format: CopyFormat
    parts: tuple[Part, ...]
    """Those with the samples, in their order."""
    beside: tuple[Part, ...] = ()
    """Captions and tables that lie beside them."""
    slices: tuple[tuple[SplitPart, tuple[str, ...]], ...] = field(default=(), repr=False)
    """Of a split that is not taken as a whole: its parts, each with its files."""

    @property
    def size(self) -> int:
        return sum(part.remote.size or 0 for part in (*self.parts, *self.beside))


def kind_for(dataset: Dataset) -> Kind:
    """What is looked for in tables and archives."""
    return dataset.dataset_type if dataset.dataset_type in ("video", "audio") else "image"


def media_column(dataset: Dataset, options: LocalCopy) -> str:
    return options.media_column or ("url" if options.format == "urls" else kind_for(dataset))


def lay_out(dataset: Dataset, options: LocalCopy, source: CopySource) -> Layout:
    files = {path: file for path, file in source.files().items() if not is_hidden(path) and refusal(path) is None}
    found = options.format if options.format != "auto" else _detect(dataset, files)
    candidates = _candidates(dataset, found, files)
    if not candidates:
        raise _nothing(dataset, found, files)
    if found == "urls":
        return Layout("urls", tuple(Part(path, files[path]) for path in candidates))
    chosen = _of_split(dataset, options, source, candidates)
    wanted = dict.fromkeys(path for _, paths in chosen for path in paths)
    whole = all(part.is_whole for part, _ in chosen)
    layout = Layout(
        found, tuple(Part(path, files[path]) for path in wanted), tuple(_beside(dataset, found, files, wanted)),
        () if whole else chosen,
    )  # fmt: skip
    if layout.slices and found == "files":
        return _sliced(layout, dict.fromkeys(wanted, 1))
    if layout.slices and found == "archives":
        expected = "a whole split: how many samples an archive has is known only when it is unpacked"
        raise CopyError.of(dataset.id, found=f"split {options.split}", expected=expected, hint="remove the brackets")
    return layout


def with_rows(layout: Layout, counts: Mapping[str, int]) -> Layout:
    """A sliced split of tables, now that the number of their rows is known: only files that have some are kept."""
    return _sliced(layout, counts) if layout.slices else layout


def _sliced(layout: Layout, counts: Mapping[str, int]) -> Layout:
    rows: dict[str, range] = {}
    for part, paths in layout.slices:
        wanted, at = part.bounds(sum(counts[path] for path in paths)), 0
        for path in paths:
            own = range(max(0, wanted.start - at), min(counts[path], wanted.stop - at))
            if len(own):
                rows[path] = own
            at += counts[path]
    kept = tuple(
        Part(part.path, part.remote, rows[part.path] if layout.format == "parquet" else None)
        for part in layout.parts
        if part.path in rows
    )
    return Layout(layout.format, kept, layout.beside)


def _detect(dataset: Dataset, files: Mapping[str, RemoteFile]) -> CopyFormat:
    """Whatever has most bytes: a dataset of tables may show some pictures, one of pictures may have a table."""
    table = dataset.captions.table
    own = None if table is None else table.path
    sizes: dict[CopyFormat, int] = {"files": 0, "parquet": 0, "archives": 0}
    media = frozenset[str]().union(*MEDIA.values())
    for path, file in files.items():
        suffix = f".{path.rpartition('.')[2].lower()}"
        if is_archive(path):
            sizes["archives"] += 1 + (file.size or 0)
        elif suffix == ".parquet" and not is_metadata(path) and path != own:
            sizes["parquet"] += 1 + (file.size or 0)
        elif suffix in media:
            sizes["files"] += 1 + (file.size or 0)
    return max(sizes, key=lambda name: sizes[name])


def _candidates(dataset: Dataset, found: CopyFormat, files: Mapping[str, RemoteFile]) -> list[str]:
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
    """A hub's dataset has splits; of other storage everything is meant, unless a split is asked for."""
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
    there = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda one: -one[1])[:5])
    wanted = {"parquet": ".parquet files", "archives": "tar or zip archives", "urls": "a table"}
    return CopyError.of(
        dataset.id,
        found=f"no {wanted.get(found, f'{kind_for(dataset)} files')} in {dataset.path}: "
        + (f"there is {there}" if there else "it is empty"),
        expected=f"{kind_for(dataset)} files, Parquet tables or archives of them",
        hint="check the dataset's path, its dataset_type and local_copy.format",
    )
