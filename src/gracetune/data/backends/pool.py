"""The backends of a run. A folder used by several datasets is opened and staged once.

Datasets of type `in_memory` share one copy if they have the same folder and the same `compression`. The copy holds
every file that any of them needs, under the smallest `memory_limit_gb` and with the largest `num_workers` among them.
A different `compression` needs a second copy of the folder, which a note points out.

`StagingCheck` replaces the pool for a dry run: it checks whether the datasets could be staged, without staging them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gracetune.config.dataset_config import Dataset
from gracetune.config.registry import is_installed
from gracetune.data.backend import Backend
from gracetune.data.backends.open import open_backend, open_unstaged, options_of
from gracetune.data.backends.storage import Storage
from gracetune.data.staging.file_selection import ExtensionSelection, selection_for
from gracetune.data.staging.memory import StagingEstimate
from gracetune.data.staging.report import OnProgress, unwatched
from gracetune.data.staging.stager import stager_for
from gracetune.hardware import Machine, probe
from gracetune.hostmem.sharing import LocalRanks


@dataclass(frozen=True)
class SharedFolder:
    """A folder that is opened once for all datasets that can share it."""

    dataset: Dataset
    """The first of these datasets, with the combined staging options."""
    selection: ExtensionSelection
    """Every file that any of them needs. Only used if the folder is staged."""
    ids: tuple[str, ...]

    def serves(self, dataset: Dataset) -> bool:
        """Whether the dataset can use this backend."""
        if not _can_share(self.dataset, dataset):
            return False
        return not dataset.is_staged or self.selection.covers(selection_for(dataset))


def shared_folders(datasets: Iterable[Dataset]) -> tuple[SharedFolder, ...]:
    """The folders a run opens, in the order of its datasets."""
    groups: list[list[Dataset]] = []
    for dataset in datasets:
        if dataset.disabled:
            continue
        group = next((group for group in groups if _can_share(group[0], dataset)), None)
        if group is None:
            groups.append([dataset])
        else:
            group.append(dataset)
    return tuple(map(_shared, groups))


def sharing_notes(folders: Sequence[SharedFolder]) -> Iterator[str]:
    """Notes about folders that are shared between datasets or staged twice."""
    staged = [folder for folder in folders if folder.dataset.is_staged]
    for folder in staged:
        limit = folder.dataset.in_memory.memory_limit_gb
        if len(folder.ids) > 1:
            limited = "" if limit is None else f"; memory_limit_gb {limit:g}, the smallest of them, applies to all"
            yield f"datasets {', '.join(folder.ids)} share {folder.dataset.path}: it is staged once{limited}"
    for position, folder in enumerate(staged):
        others = [other for other in staged[:position] if _source_of(other.dataset) == _source_of(folder.dataset)]
        if others:
            first = others[0].dataset
            yield (
                f"{folder.dataset.path} is staged again for {', '.join(folder.ids)}: compression is "
                f"{folder.dataset.in_memory.compression} there and {first.in_memory.compression} for {first.id}; "
                "give both the same in_memory.compression to stage it once"
            )


class BackendPool:
    """Opens and closes the backends of a run's datasets. Every rank must open them in the same order.

    with BackendPool(config.datasets, machine=machine) as pool:
        index = build_index(config, geometry, open_backend=pool.open)
    """

    def __init__(
        self,
        datasets: Iterable[Dataset] = (),
        *,
        machine: Machine | None = None,
        ranks: LocalRanks | None = None,
        watch: Callable[[Dataset], OnProgress] = lambda dataset: unwatched,
    ) -> None:
        self._machine, self._ranks, self._watch = machine, ranks, watch
        self.folders = [*shared_folders(datasets)]
        self._opened: dict[str, Storage] = {}

    def open(self, dataset: Dataset) -> Storage:
        """The dataset's backend. Datasets that differ only in how the files are used get the same one."""
        folder = find_folder(self.folders, dataset)
        first = folder.dataset
        if first.id not in self._opened:
            self._opened[first.id] = open_backend(
                first,
                machine=self._machine,
                ranks=self._ranks,
                on_progress=self._watch(first),
                selection=folder.selection,
            )
        return self._opened[first.id]

    @property
    def opened(self) -> tuple[Storage, ...]:
        """All open backends, in the order in which they were opened."""
        return tuple(self._opened.values())

    def close(self) -> None:
        while self._opened:
            _, backend = self._opened.popitem()
            backend.close()

    def __enter__(self) -> BackendPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def find_folder(folders: list[SharedFolder], dataset: Dataset) -> SharedFolder:
    """The folder that serves a dataset. A folder that is not a dataset of the config, such as masks, is added."""
    found = next((folder for folder in folders if folder.serves(dataset)), None)
    if found is None:
        found = _shared([dataset])
        folders.append(found)
    return found


def _source_of(dataset: Dataset) -> tuple[str, str]:
    """Backend type and real location, which are the same for datasets of one folder."""
    path = dataset.path if "://" in dataset.path else os.path.realpath(Path(dataset.path).expanduser())
    return dataset.type, path


def _can_share(one: Dataset, other: Dataset) -> bool:
    if _source_of(one) != _source_of(other) or one.storage != other.storage:
        return False
    if is_installed(one.type):
        return options_of(one) == options_of(other)
    return not one.is_staged or one.in_memory.compression == other.in_memory.compression


def _shared(datasets: Sequence[Dataset]) -> SharedFolder:
    """Combine the staging options and selections of datasets that share a folder."""
    staging = [dataset.in_memory for dataset in datasets]
    limits = [one.memory_limit_gb for one in staging if one.memory_limit_gb is not None]
    workers = [one.num_workers for one in staging if one.num_workers is not None]
    options = staging[0].model_copy(
        update={"memory_limit_gb": min(limits, default=None), "num_workers": max(workers, default=None)}
    )
    selections = [selection_for(dataset) for dataset in datasets]
    return SharedFolder(
        datasets[0].model_copy(update={"in_memory": options}),
        ExtensionSelection(
            media=frozenset[str]().union(*(one.media for one in selections)),
            sidecars=frozenset[str]().union(*(one.sidecars for one in selections)),
        ),
        tuple(dataset.id for dataset in datasets),
    )


# -- a dry run ---------------------------------------------------------------------------------------------------------


class StagingCheck:
    """Opens datasets without staging and raises the errors that a run would.

    Memory that one dataset will need counts as used for the next.
    """

    def __init__(self, datasets: Iterable[Dataset] = (), machine: Machine | None = None) -> None:
        self._machine = machine
        self._folders = [*shared_folders(datasets)]
        self.estimates: dict[str, StagingEstimate] = {}
        """The estimate of each folder to be staged, by the id of its first dataset. Mask folders have their own ids."""
        self.notes = [*sharing_notes(self._folders)]

    def open(self, dataset: Dataset) -> Backend:
        folder = find_folder(self._folders, dataset)
        if dataset.is_staged and folder.dataset.id not in self.estimates:
            self.estimates[folder.dataset.id] = self._estimate(folder)
        return open_unstaged(dataset)

    def _estimate(self, folder: SharedFolder) -> StagingEstimate:
        self._machine = self._machine or probe()
        taken = sum(estimate.stored for estimate in self.estimates.values())
        stager = stager_for(folder.dataset, self._machine, selection=folder.selection)
        estimate, unchecked = stager.estimate(used_by_others=taken)
        if unchecked is not None:
            self.notes.append(f"dataset {folder.dataset.id}: {unchecked}")
        return estimate
