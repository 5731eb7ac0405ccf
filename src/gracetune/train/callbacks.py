"""The callbacks of a run: one ordered list of everything that happens between the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gracetune.telemetry.dispatcher import Telemetry
from gracetune.train.guards import MemoryGuard, NanGuard, host_room
from gracetune.train.held_out import HeldOut
from gracetune.train.hooks import Callback
from gracetune.train.load import LoadedRun
from gracetune.train.logs import MemoryUsage, TrainingLog
from gracetune.train.preflight import Preflight
from gracetune.train.prompts import prompts_of
from gracetune.train.requested import TakenRequests
from gracetune.train.run_identity import metadata_of
from gracetune.train.run_uploads import RunUploads
from gracetune.train.saving import Saving
from gracetune.train.self_check import SelfCheck
from gracetune.train.validation import Sampling
from gracetune.train.view import View


@dataclass(frozen=True, eq=False)
class RunCallbacks:
    ordered: tuple[Callback, ...]
    """In the order in which the loop calls them."""
    check_saved: Callable[[Sequence[Path]], str | None]
    """The self-check of saved files (`SelfCheck.check_saved`), which also checks the final ones."""


def callbacks_of(
    ready: Preflight, loaded: LoadedRun, telemetry: Telemetry, view: View, uploads: RunUploads
) -> RunCallbacks:
    """Build the callbacks. The comments at the end of this function explain their order."""
    config, machine, folder, runtime = ready.config, ready.machine, ready.folder, ready.runtime
    job, memory, cached = loaded.job, loaded.memory, loaded.cached
    model, state, control, pauses = job.evaluated, job.state, job.control, job.pauses
    prompts = prompts_of(config.validation, ready.model.spec, ready.model.facts, cached)
    metadata = metadata_of(config, ready.identity, cached.index, machine)
    gradients = NanGuard(state, control)
    pressure = MemoryGuard(memory, state.position, control, telemetry, view)
    log = TrainingLog(
        telemetry=telemetry, config=config, machine=machine, view=view, runtime=runtime,
        usage=MemoryUsage(machine, job.device, job.trained_model, state.optimizer, job.source, job.step), state=state,
        source=job.source, ramp=job.ramp, pauses=pauses, model=job.trained_model.source.name,
        trained=job.trained_model.trained,
        resumed=None if ready.start.checkpoint is None else ready.start.step, planned=ready.planned,
        preparation=loaded.preparation, first_ms=loaded.first_batch.once_ms,
    )  # fmt: skip
    requested = TakenRequests(folder, model, control, telemetry, view)
    self_check = SelfCheck(
        config, folder, model, loaded.example, control, pauses, telemetry, view, steps=job.length.steps
    )  # fmt: skip
    held_out = HeldOut(config, cached, model, pauses, telemetry, view, repair=job.repair)
    samples = Sampling(
        config, folder, model, ready.store, control, pauses, telemetry, view, room=host_room(machine, memory),
        prompts=prompts, requested=requested,
    )  # fmt: skip
    saving = Saving(
        loaded.saved, folder, ready.store, metadata, runtime, control, pauses, telemetry, view,
        failure=gradients.settle, check_saved=self_check.check_saved, samples_follow=samples.is_due,
        requested=requested, on_saved=uploads.upload_checkpoint,
    )  # fmt: skip
    ordered: tuple[Callback, ...] = (
        gradients,  # the guards come first, so that the others see a stop they request
        pressure,
        log,  # before the slow ones, so that a step's log line does not wait for them
        requested,  # before what carries requests out
        self_check,  # before saving, which checks the first saved file with it
        held_out,
        saving,
        samples,  # last: generating is slow, and if it fails the step's checkpoint is already saved
    )
    return RunCallbacks(ordered, self_check.check_saved)
