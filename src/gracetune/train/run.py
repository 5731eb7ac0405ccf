"""One run, from a config to the trained weights: verbs in order. Each is a small module of this folder.

result = train(config, environment=environment, options=RunOptions(), view=View())
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.hardware import probe
from gracetune.memory.layer import UnifiedMemory
from gracetune.models.encoders import encoders_of
from gracetune.models.experts import trained_experts
from gracetune.models.facts import facts_of
from gracetune.models.registry import geometry
from gracetune.train.asked import check_requests
from gracetune.train.assembly import assemble, check_optimizer, open_host, open_memory, refuse_two_halves, where_of
from gracetune.train.control import Stop, listening
from gracetune.train.data import fill_caches, live_encoders, stage
from gracetune.train.determinism import deterministic
from gracetune.train.dry import DryBatch, dry_batch, hours_left, memory_explained
from gracetune.train.finish import failure_told, finish
from gracetune.train.guards import MemoryGuard, NanGuard, host_room, watch
from gracetune.train.held_out import HeldOut
from gracetune.train.identity import identity_of, metadata_of
from gracetune.train.logs import Logging, check_trackers, open_telemetry
from gracetune.train.loop import fit
from gracetune.train.output import RunFolder, check_format, checkpoint_bytes
from gracetune.train.planning import Planned, choose, make_plan, processes_of, refuse_misfit, shapes_of
from gracetune.train.precision import refuse_fp8
from gracetune.train.prompts import prompts_of
from gracetune.train.renewal import renew
from gracetune.train.resume import (
    find_start,
    nothing_left,
    rates_to_start_with,
    refuse_other_data,
    refuse_other_optimizer,
    restore,
    saved_epoch,
)
from gracetune.train.runtime import open_runtime
from gracetune.train.saving import Saving
from gracetune.train.self_proof import SelfProof
from gracetune.train.trainee import check_adapter, load_trainee
from gracetune.train.validation import Sampling
from gracetune.train.view import View

LONGER = "nothing was left to do; a larger training.max_steps (--max-steps N) makes the run longer"


@dataclass(frozen=True)
class RunOptions:
    """What is said about a run and not about its result."""

    resume: str | None = None
    """`latest`, `none` or a checkpoint; None takes the config's."""
    dry_run: bool = False
    allow_other_data: bool = False
    allow_other_run: bool = False
    allow_misfit: bool = False
    """Begin although the memory plan says that it does not fit."""
    force_oversubscription: bool = False
    """Lift the cap on managed memory on a machine without a coherent link; that can hang its driver."""
    report: bool = True
    """Write the report of the whole run at its end, and say where it is."""


@dataclass(frozen=True)
class Result:
    stop: Stop | None
    """None after a dry run."""
    step: int
    steps: int
    files: tuple[Path, ...]
    planned: Planned
    dry: DryBatch | None
    """None where nothing was left to do."""
    hours: float
    """What was left when the run began, by the first batch's time."""
    notes: tuple[str, ...] = ()

    @property
    def seconds_per_step(self) -> float:
        return 3600 * self.hours / max(1, self.steps - self.step)


def train(
    config: RunConfig, *, environment: Environment, options: RunOptions, view: View,
    on_memory: Callable[[UnifiedMemory], None] = lambda memory: None,
) -> Result:  # fmt: skip
    """`on_memory` is told of the unified-memory layer once it is open.

    One straight line, longer than our functions are: the order in which a run fails, loads and learns is read here.
    """
    with ExitStack() as stack:
        stack.enter_context(deterministic(config, view))
        runtime = stack.enter_context(open_runtime(config.training.mixed_precision, environment))
        runtime.seed(config.training.seed)
        refuse_two_halves(config)
        refuse_fp8(config, runtime)
        machine = probe()
        encoders = encoders_of(config, runtime.device)
        spec, source = encoders.spec, encoders.source
        facts = facts_of(config, spec, source)
        trained = trained_experts(config.model.experts, facts)
        optimizer = check_optimizer(config, trained, runtime.device)
        check_trackers(config, main=runtime.is_main)
        forced = options.force_oversubscription
        planned = runtime.from_main(
            lambda: make_plan(
                config, machine, spec, source, facts, processes=processes_of(runtime), force_oversubscription=forced
            )
        )
        view.planned(planned, machine)
        refuse_misfit(planned, allowed=options.allow_misfit)

        folder = RunFolder.of(config)
        keep = config.checkpoints
        store = stack.enter_context(
            CheckpointStore(folder.checkpoints, keep.keep_last, keep.keep_every_steps, ranks=runtime)
        )
        identity = identity_of(config, source, facts)
        asked = options.resume or keep.resume
        start = find_start(
            asked, store, folder, identity, trained, allow_other_run=options.allow_other_run, dry_run=options.dry_run
        )
        view.say(start.reason)
        there = nothing_left(start, config, folder, [expert for expert in facts.experts if expert.name in trained])
        if there:
            return Result(Stop("finished", LONGER), start.step, start.step, there, planned, None, 0.0)
        refuse_other_optimizer(start, config, optimizer, folder, trained)
        if runtime.is_main:
            folder.check()
        check_requests(config, spec, facts, view.warn)
        shapes = check_adapter(config, spec, source, facts)
        rates = rates_to_start_with(config, start, facts, shapes)

        memory = open_memory(
            config, machine, runtime, environment, view, stack,
            managed_elsewhere=planned.managed_bytes, force_oversubscription=forced,
        )  # fmt: skip
        if memory is not None:
            on_memory(memory)
        where = where_of(config, machine, runtime, environment, memory, view)
        index = stage(config, geometry(facts.family, facts.flavour), machine, runtime, view, stack)
        cached = fill_caches(config, index, encoders, runtime, where, view, stack, epoch=saved_epoch(start))

        refuse_other_data(start, cached.index, allowed=options.allow_other_data)

        choices, reasons = choose(
            config, planned, spec.attention, runtime.device, encoders.placement.dtype, shapes=shapes_of(cached.index)
        )
        host = open_host(config, planned, machine, runtime, memory, facts)
        with view.phase("loading the model"):
            trainee = load_trainee(config, spec, source, facts, runtime, choices, host)
        about_files = check_format(trainee, config)
        if runtime.is_main:
            store.check_room(checkpoint_bytes(trainee))
        live = live_encoders(cached.index, encoders, cached.keys, stack)
        job = assemble(config, trainee, cached, live, runtime, memory, view, stack, where)
        notes = restore(
            job, config, start, folder, rates, allow_other_data=options.allow_other_data, dry_run=options.dry_run
        )
        renewal = renew(job, config, cached, encoders, where, view, stack)
        for line in (*reasons, *trainee.decisions, host.reason, *about_files, *cached.report, *notes):
            view.say(line)

        with view.phase("first batch"):
            dry = dry_batch(job, config.training.batch_size, planned)
        if trainee.compiling is not None:
            view.say(trainee.compiling)
        hours = hours_left(job, dry, config.training.batch_size)
        if options.dry_run:
            return Result(None, job.position.step, job.length.steps, (), planned, dry, hours, notes)
        metadata = metadata_of(config, identity, cached.index, machine)
        telemetry = stack.enter_context(open_telemetry(config, folder, view, main=runtime.is_main))
        resumed = None if start.checkpoint is None else start.step
        watchdog = stack.enter_context(watch(machine, memory, view))
        # Guards first: what they find is part of what the others see. Samples last: they take long, and whatever they
        # meet, the step's checkpoint is saved.
        job.callbacks = [
            NanGuard(),
            MemoryGuard(memory, watchdog, telemetry, view),
            Logging(telemetry, config, machine, view, resumed, dry.once_ms),
            SelfProof(config, folder, telemetry, view),
            HeldOut(config, cached, telemetry, view),
            Saving(job, config, folder, store, metadata, telemetry, view),
            Sampling(
                config,
                folder,
                telemetry,
                view,
                room=host_room(machine, memory),
                prompts=prompts_of(config.validation, spec, facts, cached),
            ),
        ]
        began = time.monotonic()
        told = failure_told(job, folder, telemetry, began=began)
        with told, listening(job.control, view.say), memory_explained(job, planned):
            stop = fit(job)
        if trainee.parking is not None:
            view.say(trainee.parking.stats.line)
        if host.switches.followed_bytes:
            view.say(host.switches.line)
        files = finish(
            job, config, folder, cached, stop, telemetry, view, began=began, renewal=renewal, report=options.report
        )
        return Result(stop, job.position.step, job.length.steps, files, planned, dry, hours, notes)
