"""The settings and actions of staging one dataset: survey its files, estimate the memory, and stage them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from gracetune.data.backend import Backend
from gracetune.data.backends.handle import to_json
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.listing import Listing, survey
from gracetune.data.staging.copying import StagingOptions, default_threads, stage_files
from gracetune.data.staging.file_selection import ExtensionSelection
from gracetune.data.staging.memory import Estimate, StagingMemoryGuard, estimate_stored
from gracetune.data.staging.report import OnProgress, StagingReport, unwatched
from gracetune.hardware import Machine
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

    def estimate(self, *, spoken_for: int = 0) -> tuple[Estimate, str | None]:
        """Estimate the memory, and return a note if something could not be checked.

        Raises MemoryLimitError if staging would. `spoken_for` is the main memory that other datasets will use by then.
        """
        estimate = estimate_stored(self.source, self.survey().files, codec_for(self.options.compression))
        return estimate, self._guard(spoken_for=spoken_for).check(estimate)

    def stage_files(self, listing: Listing) -> tuple[list[Segment], StagingReport]:
        return stage_files(
            self.source,
            listing,
            self.options,
            guard=self._guard(),
            choice=choose_nodes(self.machine),
            on_progress=self.on_progress,
        )

    def _guard(self, *, spoken_for: int = 0) -> StagingMemoryGuard:
        sensor = HostSensor(self.machine.gpus)

        def headroom() -> int | None:
            left = sensor.read().headroom
            return None if left is None else left - spoken_for

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
    with offer.refusing():
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
