"""Everything that decides how one dataset is staged, kept together so that a refresh does it the same way again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from gracetune.data.backend import Backend
from gracetune.data.backends.handle import to_json
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.listing import Listing, survey
from gracetune.data.staging.copying import StagingOptions, default_threads, stage
from gracetune.data.staging.estimate import Estimate, estimate_stored
from gracetune.data.staging.guard import MemoryGuard
from gracetune.data.staging.progress import OnProgress, unwatched
from gracetune.data.staging.report import StagingReport
from gracetune.data.staging.selection import Selection
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
    selection: Selection
    options: StagingOptions
    machine: Machine
    limit: int | None = None
    """Bytes the staged files may take; main memory and the control group set their own limits besides."""
    on_progress: OnProgress = unwatched

    def survey(self) -> Listing:
        """What should be staged, as the source has it now."""
        return self.selection.apply(survey(self.source))

    def estimate(self, *, spoken_for: int = 0) -> tuple[Estimate, str | None]:
        """What staging would take, and what could not be checked; refused where staging would refuse it.

        `spoken_for` is what other datasets will have taken of main memory by then.
        """
        estimate = estimate_stored(self.source, self.survey().files, codec_for(self.options.compression))
        return estimate, self._guard(spoken_for=spoken_for).check(estimate)

    def stage(self, listing: Listing) -> tuple[list[Segment], StagingReport]:
        return stage(
            self.source,
            listing,
            self.options,
            guard=self._guard(),
            choice=choose_nodes(self.machine),
            on_progress=self.on_progress,
        )

    def _guard(self, *, spoken_for: int = 0) -> MemoryGuard:
        sensor = HostSensor(self.machine.gpus)

        def headroom() -> int | None:
            left = sensor.read().headroom
            return None if left is None else left - spoken_for

        reserve = host_reserve(self.machine)
        return MemoryGuard(self.options.dataset, limit=self.limit, headroom=headroom, reserve=reserve)

    def open(self) -> InMemoryBackend:
        segments, report = self.stage(self.survey())
        return InMemoryBackend(segments, root=self.source.root, report=report)


def open_for(ranks: LocalRanks, name: str, make: Callable[[], Stager]) -> InMemoryBackend:
    """Stage as local rank 0, and hand the same pages to the other ranks as they ask for them.

    The stager is made here, because that can fail too (its folder may be missing), and the others wait for an answer.
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


def threads_for(machine: Machine, asked: int | None) -> int:
    return asked or default_threads(machine.host.cpu_count or os.cpu_count())


def limit_for(gigabytes: float | None) -> int | None:
    """`memory_limit_gb` is decimal, as everywhere in the configuration."""
    return None if gigabytes is None else int(gigabytes * 1e9)
