"""The settings and actions of staging one dataset: survey its files, estimate the memory, and stage them.

`BACKEND` opens a dataset of type `in_memory`: its folder or URL is staged and shared by the processes of the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gracetune.config.dataset_config import Dataset, StorageAccess
from gracetune.data.backend import Backend, Listing, survey
from gracetune.data.backends.in_memory import InMemoryBackend, attach, fetch_staged
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.record import DatasetBackend, Opening
from gracetune.data.backends.storage import to_json
from gracetune.data.backends.url import UrlBackend
from gracetune.data.staging.copying import StagingOptions, default_threads, stage_files
from gracetune.data.staging.file_selection import ExtensionSelection, selection_for
from gracetune.data.staging.memory import StagingEstimate, StagingMemoryGuard, estimate_stored
from gracetune.data.staging.report import OnProgress, StagingReport, unwatched
from gracetune.hardware import Machine, probe
from gracetune.hardware.allocation import host_reserve
from gracetune.hostmem.compression import codec_for
from gracetune.hostmem.numa import choose_nodes
from gracetune.hostmem.segment import Segment
from gracetune.hostmem.sensors import HostSensor
from gracetune.hostmem.sharing import LocalRanks, Offer


@dataclass(frozen=True)
class Stager:
    source: Backend
    selection: ExtensionSelection
    options: StagingOptions
    machine: Machine
    limit: int | None = None
    """Maximum bytes of the staged files, in addition to the limits of main memory and the control group."""
    on_progress: OnProgress = unwatched

    def survey(self) -> Listing:
        """The files to stage, from the source's current content."""
        return self.selection.apply(survey(self.source))

    def estimate(self, *, used_by_others: int = 0) -> tuple[StagingEstimate, str | None]:
        """Estimate the memory, and return a note if something could not be checked.

        Raises MemoryLimitError if staging would. `used_by_others`: bytes of main memory that other datasets will use.
        """
        estimate = estimate_stored(self.source, self.survey().files, codec_for(self.options.compression))
        return estimate, self._guard(used_by_others=used_by_others).check(estimate)

    def stage_files(self, listing: Listing) -> tuple[list[Segment], StagingReport]:
        return stage_files(
            self.source,
            listing,
            self.options,
            guard=self._guard(),
            choice=choose_nodes(self.machine),
            on_progress=self.on_progress,
        )

    def _guard(self, *, used_by_others: int = 0) -> StagingMemoryGuard:
        sensor = HostSensor(self.machine.gpus)

        def headroom() -> int | None:
            left = sensor.read().headroom
            return None if left is None else left - used_by_others

        reserve = host_reserve(self.machine)
        return StagingMemoryGuard(self.options.dataset, limit=self.limit, headroom=headroom, reserve=reserve)

    def open(self) -> InMemoryBackend:
        segments, report = self.stage_files(self.survey())
        return InMemoryBackend(segments, root=self.source.root, report=report)


def open_for(ranks: LocalRanks, name: str, make: Callable[[], Stager]) -> InMemoryBackend:
    """Stage as local rank 0 and share the pages with the other ranks.

    `make` is called after the offer is open. It can fail too, for example if the folder is missing, and the waiting
    ranks must then receive the error.
    """
    offer = Offer(ranks, name)
    with offer.rejecting_on_error():
        backend = make().open()
    backend.keep(offer)
    try:
        offer.publish(json.loads(to_json(backend.handle())), backend.descriptors())
    except BaseException:
        backend.close()
        raise
    return backend


def threads_for(machine: Machine, requested: int | None) -> int:
    return requested or default_threads(machine.host.cpu_count or os.cpu_count())


def limit_for(gigabytes: float | None) -> int | None:
    """`memory_limit_gb` in bytes. It is decimal, as everywhere in the configuration."""
    return None if gigabytes is None else int(gigabytes * 1e9)


# -- datasets of type in_memory ----------------------------------------------------------------------------------------


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
