"""Opening backends from a dataset's configuration or from another process's handle.

A dataset is opened with the backend of its type, which is built in or comes from an installed package.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from gracetune.config.base import Options
from gracetune.config.dataset_config import Dataset
from gracetune.config.registry import BACKENDS, is_installed, validated
from gracetune.data.backends.errors import UnreadableFilesError, too_many
from gracetune.data.backends.in_memory import InMemoryBackend, attach
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.paths import suffix_of
from gracetune.data.backends.record import DatasetBackend, Opening
from gracetune.data.backends.storage import BackendHandle, SourceHandle, StagedHandle, Storage
from gracetune.data.backends.url import UrlBackend
from gracetune.data.staging.copying import StagingOptions
from gracetune.data.staging.file_selection import MEDIA, ExtensionSelection, select
from gracetune.data.staging.report import OnProgress, unwatched
from gracetune.data.staging.stager import Stager, limit_for, plain_backend, threads_for
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe
from gracetune.hostmem.compression import CODECS, Compression
from gracetune.hostmem.sharing import LocalRanks


def open_backend(
    dataset: Dataset,
    *,
    machine: Machine | None = None,
    ranks: LocalRanks | None = None,
    on_progress: OnProgress = unwatched,
    selection: ExtensionSelection | None = None,
) -> Storage:
    """Open a dataset's backend, and stage it if it is of type `in_memory`. The caller must close it.

    With `ranks`, the local processes of a launch share what the first of them stages. `selection` chooses the files to
    stage; None stages those the dataset needs.
    """
    return open_with(Opening(dataset, machine=machine, ranks=ranks, on_progress=on_progress, selection=selection))


def open_unstaged(dataset: Dataset) -> Storage:
    """Open a dataset without staging it: its files are read from their source."""
    return open_with(Opening(dataset)) if is_installed(dataset.type) else plain_backend(dataset.path, dataset.storage)


def attach_backend(handle: BackendHandle) -> Storage:
    """Open the backend that a handle of another process describes. Staged data shares the same pages."""
    return attach(handle) if isinstance(handle, StagedHandle) else open_source(handle)


def open_source(handle: SourceHandle) -> LocalBackend | UrlBackend:
    return LocalBackend(handle.root) if handle.kind == "local" else UrlBackend(handle.root)


class GH200InMemoryBackend(InMemoryBackend):
    """A folder staged in memory without a configuration, with the name and options of the GH200 guides.

    with GH200InMemoryBackend("photos", compression="lz4", memory_limit_gb=200) as files:
        image = files.read(files.list()[0])

    Raises UnreadableFilesError if more than `corrupt_threshold` of the media are unreadable. Up to that share, reading
    an unreadable file raises an error with the reason.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        compression: str | None = None,
        num_workers: int | None = None,
        memory_limit_gb: float | None = None,
        file_extensions: Iterable[str] | None = None,
        corrupt_threshold: float = 0.05,
        machine: Machine | None = None,
        on_progress: OnProgress = unwatched,
    ) -> None:
        codec = _checked_options(compression, num_workers, memory_limit_gb)
        machine = machine or probe()
        source = plain_backend(os.fspath(root))
        name = Path(os.fspath(root)).name or os.fspath(root)
        selection = select(MEDIA, extensions=file_extensions)
        stager = Stager(
            source=source,
            selection=selection,
            options=StagingOptions(dataset=name, compression=codec, threads=threads_for(machine, num_workers)),
            machine=machine,
            limit=limit_for(memory_limit_gb),
            on_progress=on_progress,
        )
        listing = stager.survey()
        segments, report = stager.stage_files(listing)
        super().__init__(segments, root=source.root, report=report)
        unreadable = [one for one in report.unreadable if suffix_of(one.path) in selection.media]
        total = sum(suffix_of(path) in selection.media for path in listing.files)
        if too_many(len(unreadable), total, corrupt_threshold):
            self.close()
            raise UnreadableFilesError(name, unreadable, total=total, threshold=corrupt_threshold)


def _checked_options(compression: str | None, num_workers: int | None, memory_limit_gb: float | None) -> Compression:
    """Validate options that do not come from a configuration, and return the compression."""
    supported = ("none", *CODECS)
    codec = (compression or "none").strip().lower()
    problems = []
    if codec not in supported:
        problems.append(
            Problem("compression", repr(compression), f"one of {', '.join(supported)}", "compression='lz4'")
        )
    if num_workers is not None and num_workers < 1:
        problems.append(Problem("num_workers", str(num_workers), "1 or more", "leave it out for one per CPU"))
    if memory_limit_gb is not None and not (math.isfinite(memory_limit_gb) and memory_limit_gb > 0):
        problems.append(Problem("memory_limit_gb", str(memory_limit_gb), "more than 0", "memory_limit_gb=200"))
    if problems:
        raise ConfigError(problems)
    return cast("Compression", codec)


def open_with(opening: Opening) -> Storage:
    """Open a dataset.

    An installed backend gets its validated options, but no progress callback and no selection, which are for staging.
    """
    dataset = opening.dataset
    record = BACKENDS.load_as(dataset.type, DatasetBackend)
    if not is_installed(dataset.type):
        return record.open(opening)
    options, invalid = validated(dataset.type, options_of(dataset))
    if invalid:
        raise ConfigError([
            Problem(f"dataset {dataset.id}: {'.'.join(map(str, (dataset.type, *one.path)))}", f"{one.found!r}",
                    one.expected, "read the documentation of the package that provides this backend")
            for one in invalid
        ])  # fmt: skip
    found = record.open(Opening(dataset, options, opening.machine, opening.ranks))
    if not isinstance(found, Storage):
        raise BACKENDS.rejected(dataset.type, f"`open` returned a {type(found).__name__}", "a Storage")
    return found


def options_of(dataset: Dataset) -> Options:
    """The config section of an installed backend."""
    options: Options = dict(dataset)[dataset.type]
    return options
