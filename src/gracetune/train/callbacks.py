"""Which callbacks a run has, in the order they are called at every window's end."""

from __future__ import annotations

from gracetune.checkpoint.manifest import Metadata
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.hardware import Machine
from gracetune.memory.layer import UnifiedMemory
from gracetune.memory.watchdog import Watchdog
from gracetune.telemetry.hub import Telemetry
from gracetune.train.data import Cached
from gracetune.train.dry import DryBatch
from gracetune.train.guards import MemoryGuard, NanGuard, host_room
from gracetune.train.held_out import HeldOut
from gracetune.train.job import Callback, Job
from gracetune.train.logs import Logging
from gracetune.train.output import RunFolder
from gracetune.train.saving import Saving
from gracetune.train.validation import Sampling
from gracetune.train.view import View


def callbacks_of(
    job: Job, config: RunConfig, folder: RunFolder, store: CheckpointStore, metadata: Metadata, machine: Machine,
    memory: UnifiedMemory | None, cached: Cached, telemetry: Telemetry, dry: DryBatch, view: View, resumed: int | None,
    watchdog: Watchdog,
) -> list[Callback]:  # fmt: skip
    """Guards first: what they find is part of what the others see. Saving last: it saves what the others did."""
    first_ms = 1000 * max(0.0, dry.first_seconds - dry.seconds)
    return [
        NanGuard(),
        MemoryGuard(memory, watchdog),
        Logging(telemetry, config, machine, view, resumed, first_ms),
        HeldOut(config, cached, telemetry, view),
        Sampling(config, folder, telemetry, view, room=host_room(machine, memory)),
        Saving(job, config, folder, store, metadata, telemetry, view),
    ]
