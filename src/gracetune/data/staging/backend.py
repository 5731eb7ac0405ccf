"""Opening a dataset of type `in_memory`: its folder or URL is staged and shared by the processes of the machine."""

from __future__ import annotations

from typing import Final

from gracetune.config.dataset_config import Dataset, StorageAccess
from gracetune.data.backends.in_memory import InMemoryBackend, attach, fetch_staged
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.record import DatasetBackend, Opening
from gracetune.data.backends.url import UrlBackend
from gracetune.data.staging.copying import StagingOptions
from gracetune.data.staging.file_selection import ExtensionSelection, selection_for
from gracetune.data.staging.report import OnProgress, unwatched
from gracetune.data.staging.stager import Stager, limit_for, open_for, threads_for
from gracetune.hardware import Machine, probe


def open_staged(opening: Opening) -> InMemoryBackend:
    """Stage the dataset in local rank 0. The other ranks of the machine map the same pages."""
    dataset, ranks = opening.dataset, opening.ranks
    if ranks is not None and ranks.rank > 0:
        handle, files = fetch_staged(ranks, dataset.id)
        return attach(handle, files)

    def make_stager() -> Stager:
        machine = opening.machine or probe()
        return stager_for(dataset, machine, opening.on_progress, selection=opening.selection)

    return make_stager().open() if ranks is None or ranks.count == 1 else open_for(ranks, dataset.id, make_stager)


BACKEND: Final = DatasetBackend("in_memory", open=open_staged)


def stager_for(
    dataset: Dataset,
    machine: Machine,
    on_progress: OnProgress = unwatched,
    *,
    selection: ExtensionSelection | None = None,
) -> Stager:
    """The stager of a dataset of type `in_memory`."""
    options = dataset.in_memory
    return Stager(
        source=plain_backend(dataset.path, dataset.storage),
        selection=selection or selection_for(dataset),
        options=StagingOptions(
            dataset=dataset.id,
            compression=options.compression,
            threads=threads_for(machine, options.num_workers),
        ),
        machine=machine,
        limit=limit_for(options.memory_limit_gb),
        on_progress=on_progress,
    )


def plain_backend(root: str, access: StorageAccess | None = None) -> LocalBackend | UrlBackend:
    """The backend of a folder or URL without staging."""
    return UrlBackend(root, access) if "://" in root else LocalBackend(root)
