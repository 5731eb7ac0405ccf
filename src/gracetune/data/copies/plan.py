"""Planning a copy: the downloads, disk space and memory it needs, computed before anything is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from gracetune.config.dataset_config import Dataset, LocalCopy
from gracetune.data.copies.errors import CopyError, DamagedPartError
from gracetune.data.copies.folder import CopyFolder
from gracetune.data.copies.layout import Part, SourceLayout, kind_for, lay_out, media_column, with_rows
from gracetune.data.copies.rows import METADATA
from gracetune.data.copies.sources import CopySource, open_file, open_source
from gracetune.data.copies.tables import ParquetFacts, check_columns, read_facts
from gracetune.data.errors import set_option
from gracetune.data.media import kind_of
from gracetune.data.text_format import counted
from gracetune.hub.access import HubAccess
from gracetune.storage.transfer import resumable_bytes
from gracetune.units import MIB, format_bytes

RESERVE = 64 * MIB
"""Disk space that plans never use."""
UNPACKED_AT_ONCE = 2
_TILE_GROWTH = 4
"""Cropped images are stored as PNG, which is larger than JPEG by up to this factor."""


@dataclass(frozen=True)
class CopyPlan:
    dataset: Dataset
    options: LocalCopy
    folder: CopyFolder
    source: CopySource
    index: CopySource | None
    """The source of the archives' index files (`local_copy.index`)."""
    layout: SourceLayout
    missing: tuple[Part, ...]
    """Parts that are not in the copy yet."""
    to_fetch: int
    """Bytes to download."""
    received: int
    """Bytes of incomplete files that an earlier start has downloaded. Not part of `to_fetch`."""
    disk_needed: int
    """Bytes that the disk still has to store, with the parts that are there twice while they are unpacked."""
    disk_free: int | None
    """Bytes; None if unknown."""
    memory_needed: int
    """Bytes of main memory for unpacking tables, without those for staging."""
    samples: int | None
    """The approximate number of samples; None if it is known only after unpacking."""

    @property
    def staged(self) -> int:
        """About how many bytes of main memory staging takes: the files' own size; 0 if the dataset is not staged."""
        return self.layout.size if self.dataset.is_staged else 0

    def lines(self) -> list[str]:
        """Text for the user: what is downloaded, where it is stored, and how much space is free there."""
        at = f" at {self.source.revision[:12]}" if self.source.revision else ""
        about = "" if self.samples is None else f", about {counted(self.samples, 'sample')}"
        free = "" if self.disk_free is None else f", {format_bytes(self.disk_free)} free"
        what = f"{counted(len(self.layout.parts), 'file')} of {format_bytes(self.layout.size)}{about}"
        needs = f"{format_bytes(self.to_fetch)} to download, {format_bytes(self.disk_needed)} of disk in "
        lines = [
            f"dataset {self.dataset.id}: {self.source.address}{at}: {what} ({self.layout.format})",
            f"{needs}{self.folder.root}{free}",
        ]
        if self.memory_needed:
            lines.append(f"{format_bytes(self.memory_needed)} of main memory to unpack it")
        if self.staged:
            lines.append(f"about {format_bytes(self.staged)} of main memory to stage it (in_memory)")
        return lines

    def check(self, memory_free: int | None = None, *, used_by_others: int = 0, staged_by_others: int = 0) -> None:
        """Raise CopyError if the copy does not fit.

        Other copies will use `used_by_others` bytes of the same disk, and `staged_by_others` bytes of main memory.
        """
        name, root = self.dataset.id, self.folder.root
        if self.disk_free is not None and self.disk_needed + used_by_others + RESERVE > self.disk_free:
            others = f" in addition to {format_bytes(used_by_others)} of other datasets" if used_by_others else ""
            free = format_bytes(self.disk_free)
            found = f"{format_bytes(self.disk_needed)} to store in {root}{others}, where {free} is free"
            part = set_option(name, "local_copy.split", "train[:10%]")
            hint = f"choose a larger disk: {set_option(name, 'local_copy.folder', 'FOLDER')}; or a part: {part}"
            raise CopyError.of(name, found=found, expected="a disk with room for the copy", hint=hint)
        # Staging begins when everything is unpacked.
        staged = self.staged + staged_by_others if self.staged else 0
        needed = max(self.memory_needed, staged)
        if memory_free is not None and needed > memory_free:
            with_others = staged_by_others and staged == needed
            others = f" ({format_bytes(staged_by_others)} of it for other datasets)" if with_others else ""
            found = f"{format_bytes(needed)} of main memory{others}, where {format_bytes(memory_free)} is free"
            hint = "type: local instead of in_memory, or a part of the dataset: local_copy.split"
            raise CopyError.of(name, found=found, expected="enough free main memory", hint=hint)


def plan_copy(dataset: Dataset, options: LocalCopy, folder: CopyFolder, hub: HubAccess) -> CopyPlan:
    """Plan a copy. Only the source's listing and the footers of Parquet tables are transferred."""
    before = folder.manifest()
    source = open_source(dataset, hub, revision=None if before is None else before.revision)
    layout = lay_out(dataset, options, source)
    facts: ParquetFacts | None = None
    if layout.format == "parquet":
        layout, facts = _look_into(dataset, options, source, layout)
    missing = tuple(_missing(folder, layout))
    downloads = [part for part in missing if source.cached(part.path) is None]
    fetch = [part for part in downloads if not fetched_file(folder, part).exists()]
    fetched = sum(part.remote.size or 0 for part in downloads) - sum(part.remote.size or 0 for part in fetch)
    incoming = {part.path: resumable_bytes(part_file(folder, part), part.remote) for part in fetch}
    to_fetch = sum((part.remote.size or 0) - incoming[part.path] for part in fetch)
    return CopyPlan(
        dataset, options, folder, source, _index_source(dataset, options, hub), layout, missing,
        to_fetch=to_fetch,
        received=sum(incoming.values()),
        disk_needed=_disk_needed(layout, missing, options) - sum(incoming.values()) - fetched,
        disk_free=_free(folder.root),
        memory_needed=0 if facts is None else facts.largest_group * UNPACKED_AT_ONCE,
        samples=_samples(dataset, layout, facts),
    )  # fmt: skip


def _index_source(dataset: Dataset, options: LocalCopy, hub: HubAccess) -> CopySource | None:
    if options.index is None:
        return None
    source = open_source(dataset.model_copy(update={"path": options.index}), hub)
    if not any(path.endswith(".json") for path in source.files()):
        found = f"no .json file in {options.index}"
        raise CopyError.of(
            dataset.id, found=found, expected="index files of the archives", hint="check local_copy.index"
        )
    return source


def part_file(folder: CopyFolder, part: Part) -> Path:
    """The path of a part while it is being transferred."""
    readable = part.path.rpartition("/")[2].encode()[-80:].decode(errors="ignore")
    return folder.incoming / f"{xxhash.xxh3_64_hexdigest(part.path.encode())}-{readable}.part"


def fetched_file(folder: CopyFolder, part: Part) -> Path:
    """The path of a part that is complete but not unpacked yet."""
    return part_file(folder, part).with_suffix(".complete")


def wanted_columns(dataset: Dataset, options: LocalCopy) -> dict[str, str]:
    """The columns that the config names, except the media column, each with the option that names it."""
    table = dataset.captions.table if dataset.captions.strategy == "jsonl" else None
    named = {f"local_copy.filter[{number}].column": rule.column for number, rule in enumerate(options.filter)}
    if table is not None and table.path == METADATA:
        captions, option = table.caption_column, "captions.table.caption_column"
        several = enumerate(captions) if isinstance(captions, tuple) else ()
        named |= {f"{option}[{number}]": column for number, column in several} or {option: str(captions)}
        others = table.model_dump(include={"fallback_caption_column", "width_column", "height_column"})
        named |= {f"captions.table.{name}": column for name, column in others.items() if column is not None}
    return {column: option for option, column in named.items()}


def _look_into(
    dataset: Dataset, options: LocalCopy, source: CopySource, layout: SourceLayout
) -> tuple[SourceLayout, ParquetFacts]:
    """Check the columns of the first table. If only a part of a split is wanted, read the row counts of all tables."""
    first = layout.parts[0].path

    def facts_of(path: str) -> ParquetFacts:
        try:
            with source.explained(), open_file(source, path) as file:
                return read_facts(file, path)
        except DamagedPartError as error:
            raise error.of(dataset.id, source.address, "then start again") from error

    facts = facts_of(first)
    check_columns(dataset.id, facts, media_column(dataset, options), wanted_columns(dataset, options), first)
    if layout.slices:
        counts = {part.path: facts_of(part.path).rows for part in layout.parts}
        layout = with_rows(layout, counts)
    return layout, facts


def _missing(folder: CopyFolder, layout: SourceLayout) -> Iterator[Part]:
    finished = folder.finished()
    for part in (*layout.beside, *layout.parts):
        done = finished.get(part.path)
        if done is None or not done.is_of(part) or not folder.has_part(done):
            yield part


def _disk_needed(layout: SourceLayout, missing: tuple[Part, ...], options: LocalCopy) -> int:
    """Bytes for the result, and for the largest parts that are on disk twice while they are being unpacked."""
    sizes = sorted((part.remote.size or 0 for part in missing), reverse=True)
    growth = _TILE_GROWTH if options.tile is not None else 1
    if layout.format == "files":
        return sum(sizes) * growth
    return sum(sizes) * growth + sum(sizes[:UNPACKED_AT_ONCE])


def _samples(dataset: Dataset, layout: SourceLayout, facts: ParquetFacts | None) -> int | None:
    if layout.format == "files":
        return sum(kind_of(part.path) == kind_for(dataset) for part in layout.parts)
    if facts is None:
        return None
    if all(part.rows is not None for part in layout.parts):
        return sum(len(part.rows or ()) for part in layout.parts)
    # Only the first table was read: assume that the others have as many rows per byte.
    first = layout.parts[0].remote.size or 1
    return round(facts.rows * sum(part.remote.size or 0 for part in layout.parts) / first)


def _free(folder: Path) -> int | None:
    """Free space on the disk that the folder is on or will be on."""
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None
