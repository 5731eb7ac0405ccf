"""The backends of a run. A folder that several datasets name is opened, and staged, once.

Datasets of type `in_memory` share one copy where they name the same folder and the same `compression`. The copy holds
every file that one of them needs. It obeys the smallest `memory_limit_gb` among them and is read with the largest
`num_workers`. Another `compression` means another copy of the folder; the user is told what that costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gracetune.config.dataset_backends import is_installed
from gracetune.config.dataset_config import Dataset
from gracetune.data.backends.open import open_backend
from gracetune.data.backends.registry import options_of
from gracetune.data.backends.shared import Storage
from gracetune.data.staging.progress import OnProgress, unwatched
from gracetune.data.staging.selection import Selection, selection_for
from gracetune.hardware import Machine
from gracetune.hostmem.sharing import LocalRanks


@dataclass(frozen=True)
class SharedFolder:
    """One folder as it is opened once, for all datasets that can share it."""

    dataset: Dataset
    """The first of them, with the staging options that hold for all of them."""
    selection: Selection
    """Every file one of them needs; counts only where the folder is staged."""
    ids: tuple[str, ...]

    def serves(self, dataset: Dataset) -> bool:
        if not _can_share(self.dataset, dataset):
            return False
        return dataset.type != "in_memory" or self.selection.covers(selection_for(dataset))


def shared_folders(datasets: Iterable[Dataset]) -> tuple[SharedFolder, ...]:
    """What a run opens, in the order of its datasets."""
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
    """What several datasets of one folder mean for staging, where that is not obvious."""
    staged = [one for one in folders if one.dataset.type == "in_memory"]
    for one in staged:
        limit = one.dataset.in_memory.memory_limit_gb
        if len(one.ids) > 1:
            counted = "" if limit is None else f"; memory_limit_gb {limit:g}, the smallest of them, applies to all"
            yield f"datasets {', '.join(one.ids)} share {one.dataset.path}: it is staged once{counted}"
    for position, one in enumerate(staged):
        others = [other for other in staged[:position] if _place(other.dataset) == _place(one.dataset)]
        if others:
            first = others[0].dataset
            yield (
                f"{one.dataset.path} is staged again for {', '.join(one.ids)}: compression is "
                f"{one.dataset.in_memory.compression} there and {first.in_memory.compression} for {first.id}; "
                "give both the same in_memory.compression to stage it once"
            )


class BackendPool:
    """Opens the backends of a run's datasets, and closes them all. Every rank opens them in the same order.

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
        """The dataset's backend; the same for datasets that only differ in what is done with the files."""
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
        """Each of them once, in the order in which they were opened."""
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
    """The one a dataset is served from. One that no dataset of the config named (masks) is added."""
    found = next((one for one in folders if one.serves(dataset)), None)
    if found is None:
        found = _shared([dataset])
        folders.append(found)
    return found


def _place(dataset: Dataset) -> tuple[str, str]:
    path = dataset.path if "://" in dataset.path else os.path.realpath(Path(dataset.path).expanduser())
    return dataset.type, path


def _can_share(one: Dataset, other: Dataset) -> bool:
    if _place(one) != _place(other) or one.storage != other.storage:
        return False
    if is_installed(one.type):
        return options_of(one) == options_of(other)
    return one.type != "in_memory" or one.in_memory.compression == other.in_memory.compression


def _shared(datasets: Sequence[Dataset]) -> SharedFolder:
    staging = [dataset.in_memory for dataset in datasets]
    limits = [one.memory_limit_gb for one in staging if one.memory_limit_gb is not None]
    workers = [one.num_workers for one in staging if one.num_workers is not None]
    options = staging[0].model_copy(
        update={"memory_limit_gb": min(limits, default=None), "num_workers": max(workers, default=None)}
    )
    selections = [selection_for(dataset) for dataset in datasets]
    return SharedFolder(
        datasets[0].model_copy(update={"in_memory": options}),
        Selection(
            media=frozenset[str]().union(*(one.media for one in selections)),
            sidecars=frozenset[str]().union(*(one.sidecars for one in selections)),
        ),
        tuple(dataset.id for dataset in datasets),
    )
