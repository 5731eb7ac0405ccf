"""Load a run that passed preflight: open memory, stage and cache the data, load the model, restore the checkpoint, and
try one batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from gracetune.data.copies.local import Copies
from gracetune.hub.access import HubAccess
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.memory.watchdog import Watchdog
from gracetune.models.registry import geometry
from gracetune.train.assembly import assemble, build_initial_state, cache_resources, open_host, open_memory
from gracetune.train.cache_refresh import CacheRefresh, nothing_to_refresh, start_refresh
from gracetune.train.control import Control
from gracetune.train.data import (
    CachedData,
    fetch,
    fill_caches,
    live_encoders,
    missing_latents,
    open_source,
    repair_of,
    stage_data,
)
from gracetune.train.first_batch import FirstBatch, ReferenceBatch, hours_left, try_first_batch
from gracetune.train.guards import check_memory, memory_alarm, memory_left, watch
from gracetune.train.job import TrainingJob
from gracetune.train.output import check_format, checkpoint_bytes
from gracetune.train.planning import choose, shapes_of
from gracetune.train.preflight import Preflight
from gracetune.train.preparation import PreparationTimes
from gracetune.train.resume import batch_change, reject_other_data, reject_other_data_early, restore, saved_epoch
from gracetune.train.state_parts import CheckpointSource
from gracetune.train.trained_model import load_trained_model
from gracetune.train.view import View


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run that is ready for its first step."""

    job: TrainingJob
    saved: CheckpointSource
    """What checkpoints are read from."""
    memory: UnifiedMemory | None
    """None if the config does not ask for unified memory, or this machine has none."""
    cached: CachedData
    cache_refresh: CacheRefresh | None
    """None if no dataset is encoded again for each epoch."""
    watchdog: Watchdog
    """Watches host memory during training. It is not started yet."""
    first_batch: FirstBatch
    example: ReferenceBatch
    hours: float
    """Estimated time that is left, from the time of the first batch."""
    notes: tuple[str, ...]
    """What the user should know about the resume."""
    preparation: PreparationTimes


def load(
    ready: Preflight, control: Control, view: View, stack: ExitStack, preparation: PreparationTimes, *,
    on_memory: Callable[[UnifiedMemory], None],
) -> LoadedRun:  # fmt: skip
    """Load everything and return the run. What stays open is closed with `stack`.

    Like `preflight`, this is one long function on purpose: it shows the order of loading.
    """
    config, options, runtime, machine = ready.config, ready.options, ready.runtime, ready.machine
    environment, model, planned, start = ready.environment, ready.model, ready.planned, ready.start
    memory = open_memory(
        config, machine, runtime, environment, view, stack,
        managed_elsewhere=planned.managed_bytes, force_oversubscription=options.force_oversubscription,
    )  # fmt: skip
    if memory is not None:
        on_memory(memory)
    resources = cache_resources(config, machine, runtime, environment, memory, view)
    with preparation.part("copies of remote data"):
        local = fetch(Copies(config, HubAccess.of(environment)), runtime, view)
    with preparation.part("reading the data"):
        index = stage_data(local, geometry(model.facts.family, model.facts.flavour), machine, runtime, view, stack)
    epoch = saved_epoch(start)
    # Compare the data with the checkpoint's before hours of encoding, and again once damaged files are known.
    reject_other_data_early(
        start, index, lambda: missing_latents(config, index, model.encoders, epoch=epoch),
        allowed=options.allow_other_data,
    )  # fmt: skip
    with preparation.part("caches of latents and captions"):
        cached = fill_caches(config, index, model.encoders, runtime, resources, view, stack, epoch=epoch)
    reject_other_data(start, cached.index, allowed=options.allow_other_data)

    choices, reasons = choose(
        config, planned, model.spec.attention, runtime.device, model.encoders.placement.dtype,
        shapes=shapes_of(cached.index),
    )  # fmt: skip
    host = open_host(config, planned, machine, runtime, memory, model.facts)
    with view.phase("loading the model"), preparation.part("loading the model"):
        trained_model = load_trained_model(
            config, model.spec, model.source, model.facts, runtime, choices, host, model.assistant
        )
    about_files = check_format(trained_model, config)
    if runtime.is_main:  # preflight checked this too, but the caches have grown since
        shapes = [one.shape for one in trained_model.parameters().values()]
        ready.store.check_room(checkpoint_bytes(shapes, has_masters=config.has_chunked_state))
    live = live_encoders(cached.index, model.encoders, cached.keys, stack)
    initial = build_initial_state(config, trained_model, cached.index, runtime, view)
    state = initial.state
    source = open_source(
        cached, state.loader, live, runtime, memory, stack, resources=resources, on_decision=view.report,
        per_step=None if config.training.ramp.enabled else config.training.gradient_accumulation_steps,
    )  # fmt: skip
    saved = CheckpointSource(config, trained_model, state, options.allow_other_data)
    notes = restore(
        saved, start, ready.folder, ready.rates, runtime, steps=initial.length.steps, dry_run=options.dry_run
    )  # fmt: skip
    changed = batch_change(start, config.training, runtime.world_size)
    if changed is not None:
        view.warn(changed)
    cache_refresh = start_refresh(config, cached, state, source, runtime, model.encoders, resources, view, stack)
    repair = repair_of(config, cached, state.loader, model.encoders, runtime, view)
    watchdog = watch(machine, memory, view)
    job = assemble(
        config, trained_model, cached, live, initial, source, runtime, memory, control, view,
        on_epoch_end=cache_refresh or nothing_to_refresh, memory_alarm=memory_alarm(watchdog), repair=repair,
    )  # fmt: skip
    for line in (*reasons, *trained_model.decisions, host.reason, *about_files, *cached.report, *notes):
        view.report(line)

    with view.phase("first batch"), preparation.part("first batch, compiling"):
        first_batch, example = try_first_batch(job, config.training.batch_size, planned)
    if trained_model.compiling is not None:
        view.report(trained_model.compiling)
    # The minimum over all ranks, so that all of them go on or none does.
    check_memory(machine, -runtime.highest(-memory_left(machine, memory)))
    hours = hours_left(job, first_batch, config.training.batch_size)
    return LoadedRun(
        job, saved, memory, cached, cache_refresh, watchdog, first_batch, example, hours, notes, preparation
    )
