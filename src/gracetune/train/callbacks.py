"""The callbacks of a run: the one list of everything that happens beside the steps, in its order."""

from __future__ import annotations

from contextlib import ExitStack

from gracetune.telemetry.hub import Telemetry
from gracetune.train.guards import MemoryGuard, NanGuard, host_room, watch
from gracetune.train.held_out import HeldOut
from gracetune.train.identity import metadata_of
from gracetune.train.job import Callback
from gracetune.train.load import LoadedRun
from gracetune.train.logs import Logging
from gracetune.train.preflight import Preflight
from gracetune.train.prompts import prompts_of
from gracetune.train.saving import Saving
from gracetune.train.self_proof import SelfProof
from gracetune.train.validation import Sampling
from gracetune.train.view import View


def callbacks_of(
    ready: Preflight, loaded: LoadedRun, telemetry: Telemetry, view: View, stack: ExitStack
) -> tuple[Callback, ...]:
    """Guards first: what they find is part of what the others see. Samples last: they take long, and whatever they
    meet, the step's checkpoint is saved."""
    config, machine, folder, model = ready.config, ready.machine, ready.folder, ready.model
    job, memory, cached = loaded.job, loaded.memory, loaded.cached
    resumed = None if ready.start.checkpoint is None else ready.start.step
    watchdog = stack.enter_context(watch(machine, memory, view))
    metadata = metadata_of(config, ready.identity, cached.index, machine)
    room = host_room(machine, memory)
    prompts = prompts_of(config.validation, model.spec, model.facts, cached)
    return (
        NanGuard(),
        MemoryGuard(memory, watchdog, telemetry, view),
        Logging(telemetry, config, machine, view, resumed, loaded.dry.once_ms),
        SelfProof(config, folder, telemetry, view),
        HeldOut(config, cached, telemetry, view),
        Saving(job, config, folder, ready.store, metadata, telemetry, view),
        Sampling(config, folder, telemetry, view, room=room, prompts=prompts),
    )
