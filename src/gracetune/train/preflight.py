"""Check everything that can reject a run before a model is loaded or data is cached, and report all problems at once.

A rejected run has changed nothing: no checkpoint is moved and no result is renamed. At most, digests of the weights and
a traced footprint are cached. Once a check has failed, no weights are downloaded for further checks. Checks that need
the model then run only if the model is already on the disk.

Some problems can only be found elsewhere:
- a file that cannot be parsed, or a value of the wrong type: `config.resolve.load`, before preflight, lists them;
- damaged, missing or changed data (`stage_data`, `fill_caches`, `reject_other_data`): every file has to be read;
- a schedule longer than the run, if its length is given in epochs (`build_initial_state`): the data has to be counted;
- damaged weights (`load_trained_model`): weights are read when they are loaded;
- an adapter that its file format cannot hold (`check_format`): this depends on the values of the base model;
- no room for a checkpoint (`CheckpointStore.check_room`): checked here and again in `load`, because caches grow;
- checkpoint state that does not fit (`restore`): it is compared with the loaded parameters;
- a first batch that runs out of memory or has a non-finite loss (`try_first_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.assistant import AssistantFile, as_assistant
from gracetune.cache.folders import cache_folders
from gracetune.checkpoint.resume import ResumeStart, resolve
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.environment import Environment
from gracetune.config.path_status import inspect_path
from gracetune.config.run_config import RunConfig
from gracetune.data.copies.local import Copies
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe
from gracetune.hub.access import HubAccess
from gracetune.models.encoders import FamilyEncoders, encoders_of
from gracetune.models.experts import trained_experts
from gracetune.models.fact_overrides import check_distilled, facts_of
from gracetune.models.hub_download import Fetch, HubFetcher
from gracetune.models.source import ASSISTANT_KEY, ModelSource, find_assistant, is_on_disk
from gracetune.models.spec import Expert, ExpertName, ModelFacts, ModelSpec
from gracetune.optim.aitoolkit_rates import ImportedRates
from gracetune.train.assembly import check_objective, check_optimizer, checked_ramp, reject_mixed_half_dtypes
from gracetune.train.default_samples import DefaultSamples, default_samples
from gracetune.train.determinism import deterministic
from gracetune.train.guards import check_memory
from gracetune.train.leftovers import remove_leftovers
from gracetune.train.logs import sinks_of
from gracetune.train.output import RunFolder, checkpoint_bytes
from gracetune.train.planning import PlannedRun, choose, make_plan, processes_of, reject_misfit
from gracetune.train.preflight_checks import CheckResult, Checks, check_output_paths, reject_eight_bits
from gracetune.train.resume import (
    files_if_complete,
    find_start,
    rates_to_start_with,
    reject_other_optimizer,
    resume_hint,
)
from gracetune.train.run_identity import identity_of
from gracetune.train.runtime import LaunchEnvironment, Runtime, check_launch, open_runtime
from gracetune.train.sample_requests import check_requests
from gracetune.train.trained_model import check_adapter, check_routes
from gracetune.train.view import View


@dataclass(frozen=True)
class RunOptions:
    """Options of one invocation. Unlike the config, they do not change what is trained."""

    resume: str | None = None
    """`latest`, `none` or the path of a checkpoint; None takes the config's value."""
    dry_run: bool = False
    """Plan, load and try one batch, but train nothing."""
    allow_other_data: bool = False
    """Resume even if the data differs from the checkpoint's."""
    allow_other_run: bool = False
    """Resume even if the model or the adapter differs from the checkpoint's."""
    allow_misfit: bool = False
    """Start even if the memory plan says that the run does not fit."""
    force_oversubscription: bool = False
    """Lift the cap on managed memory on a machine without a coherent link. This can hang its driver."""
    default_samples: bool = False
    """Generate samples of captions if the config has no prompts (`train.default_samples`)."""
    report: bool = True
    """Write `report.html` at the end of the run."""


T = TypeVar("T")
_INIT_FROM = "adapter.init_from"


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model whose files were found. No weights are loaded."""

    encoders: FamilyEncoders
    facts: ModelFacts
    trained: tuple[ExpertName, ...]
    assistant: AssistantFile | None = None

    @property
    def experts(self) -> list[Expert]:
        """The experts that are trained."""
        return [expert for expert in self.facts.experts if expert.name in self.trained]

    @property
    def spec(self) -> ModelSpec:
        return self.encoders.spec

    @property
    def source(self) -> ModelSource:
        return self.encoders.source


@dataclass(frozen=True, eq=False)
class Preflight:
    """A run that passed all checks: the input of `load`. Its folder is locked, unless this is a dry run."""

    config: RunConfig
    options: RunOptions
    environment: Environment
    runtime: Runtime
    machine: Machine
    model: OpenedModel
    planned: PlannedRun
    folder: RunFolder
    store: CheckpointStore
    identity: Mapping[str, str]
    start: ResumeStart
    rates: ImportedRates | None
    """Learning rates read from `optimizer.rates_from`; None if the run does not start with such rates."""
    final_files: tuple[Path, ...]
    """The final weights, if the run is complete already and nothing is left to do; else empty."""


@dataclass(frozen=True, eq=False)
class _Beginning:
    """Where the run starts: at step 0 or at a checkpoint."""

    identity: Mapping[str, str]
    start: ResumeStart
    final_files: tuple[Path, ...]
    """See `Preflight.final_files`."""


def preflight(
    config: RunConfig, *, environment: Environment, options: RunOptions, view: View, stack: ExitStack,
    known: Sequence[tuple[str, Problem]] = (),
) -> Preflight:  # fmt: skip
    """Check the run; raise all problems as one error, or return what `load` needs.

    `known` are problems that the caller has found already (missing paths), each with gracetune's name of its key. The
    process group and the lock of the checkpoint folder are closed with `stack`.

    This is one long function on purpose: it shows the order of the checks.
    """
    checks = Checks(known)
    runtime = _open_runtime(config, environment, view, checks, stack)
    runtime.seed(config.training.seed)
    if runtime.world_size > 1:
        view.report(runtime.processes_in_words)
    # If the process group was not opened, this process knows neither the world size nor the sharding.
    is_one_of_several = runtime.world_size == 1 and int(environment.get("WORLD_SIZE") or 1) > 1
    _check_settings(config, runtime, checks, is_one_of_several=is_one_of_several)
    machine = probe()
    folder, keep = RunFolder.of(config), config.checkpoints
    is_new = inspect_path(folder.path).kind == "nothing"
    if is_new and runtime.is_main:
        stack.enter_context(folder.provisional())
    checks.run(lambda: check_memory(machine, machine.host.headroom))
    if runtime.is_main and not checks.rejected:  # before the weights are downloaded, which may take long
        checks.run(lambda: _plan_copies(config, environment, machine, view))
    model = CheckResult[OpenedModel]()
    on_disk = checks.run(lambda: is_on_disk(config.model)) if checks.rejected else CheckResult(True)
    if on_disk.is_known and on_disk.value:
        fetch = HubFetcher(HubAccess.of(environment), view.report, view.on_download)
        model = checks.run(lambda: _open_model(config, runtime.device, fetch))
    # Without a model its experts are unknown; the optimizer is then checked with one nameless expert.
    trained = model.value.trained if model.is_known else ("",)
    optimizer = checks.run(lambda: check_optimizer(config, trained, runtime.device))
    # Rank 0 plans for all. Once a rank is rejected, each plans by itself: a rejected rank may skip the broadcast.
    share = runtime.from_main if not runtime.highest(int(checks.rejected)) else _call
    if options.default_samples and not is_one_of_several and not checks.rejected:
        chosen = checks.run(lambda: share(lambda: default_samples(config, model.value.spec, model.value.facts)))
        config = _with_samples(config, chosen, view)
    planned = CheckResult[PlannedRun]()
    if not is_one_of_several:
        planned = checks.run(lambda: share(lambda: _plan(config, machine, model.value, runtime, options, environment)))
    checks.run(lambda: view.planned(planned.value, machine))
    checks.run(lambda: reject_misfit(planned.value, allowed=options.allow_misfit))

    store = stack.enter_context(
        CheckpointStore(folder.checkpoints, keep.keep_last, keep.keep_every_steps, ranks=runtime)
    )
    if runtime.peers is not None:
        requested = options.resume or keep.resume
        runtime.peers.advice = partial(
            resume_hint, store, environment, requested=requested, processes=runtime.world_size
        )
    beginning = CheckResult[_Beginning]()
    if not checks.has_known_problem("output_dir"):
        rejected = checks.rejected
        beginning = checks.run(
            lambda: _find_beginning(config, model.value, store, folder, options, view, rejected=rejected)
        )
    rates: CheckResult[ImportedRates | None] = CheckResult(None)
    if not (beginning.is_known and beginning.value.final_files):
        checks.run(lambda: reject_other_optimizer(beginning.value.start, config, optimizer.value, folder, trained))
        if not (beginning.is_rejected or checks.has_known_problem("output_dir")):
            _check_folder(folder, store, checks, dry_run=options.dry_run, is_main=runtime.is_main)
            if runtime.is_main:
                checks.run(lambda: check_output_paths(folder, model.value.experts, config.adapter.kind))
        checks.run(lambda: check_objective(config, model.value.facts, model.value.trained))
        checks.run(lambda: _check_distilled(config, model.value, view))
        checks.run(lambda: check_requests(config, model.value.spec, model.value.facts, view.warn))
        checks.run(lambda: _check_attention(config, model.value, planned.value, runtime.device))
        checks.run(lambda: check_routes(config, model.value.spec, model.value.source, model.value.facts))
        shapes = checks.run(
            lambda: _check_adapter(config, model.value, init_from=not checks.has_known_problem(_INIT_FROM))
        )
        if runtime.is_main:
            room = (
                checkpoint_bytes(shapes.value.values(), has_masters=config.has_chunked_state) if shapes.is_known else 0
            )
            checks.run(lambda: store.check_room(room, beginning.value.identity))
        rates = checks.run(lambda: rates_to_start_with(config, beginning.value.start, model.value.facts, shapes.value))
    checks.raise_all(runtime)
    found = beginning.value
    if runtime.highest(int(is_new)) and (not options.dry_run or _has_caches_inside(config)):
        folder.make_private()
    return Preflight(
        config=config, options=options, environment=environment, runtime=runtime, machine=machine, model=model.value,
        planned=planned.value, folder=folder, store=store, identity=found.identity,
        start=found.start if options.dry_run else _take_folder(config, folder, store, model.value, found),
        rates=rates.value, final_files=found.final_files,
    )  # fmt: skip


def _with_samples(config: RunConfig, chosen: CheckResult[DefaultSamples], view: View) -> RunConfig:
    if not chosen.is_known:
        return config
    if chosen.value.line:
        view.report(chosen.value.line)
    return config.model_copy(update={"validation": chosen.value.validation})


def _has_caches_inside(config: RunConfig) -> bool:
    """Whether the caches are below the run's folder, so that filling them creates it."""
    return cache_folders(config).base.is_relative_to(RunFolder.of(config).path)


def _open_runtime(
    config: RunConfig, environment: Environment, view: View, checks: Checks, stack: ExitStack
) -> Runtime:  # fmt: skip
    """Open the process group, or, if the run is rejected already, return a runtime for this process alone."""
    checks.run(lambda: stack.enter_context(deterministic(config, view)))
    precision = config.training.mixed_precision
    if not checks.rejected:
        opened = checks.run(lambda: stack.enter_context(open_runtime(precision, environment)))
        if opened.is_known:
            return opened.value
    else:
        checks.run(lambda: check_launch(environment, precision))
    rank, local = (int(environment.get(name) or 0) for name in ("RANK", "LOCAL_RANK"))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return Runtime(
        rank=rank, world_size=1, local_rank=local, local_world_size=1, device=device, precision=precision,
        launch=LaunchEnvironment(), key="",
    )  # fmt: skip


def _check_settings(config: RunConfig, runtime: Runtime, checks: Checks, *, is_one_of_several: bool) -> None:
    """Check settings that depend neither on the model nor on the run's folder."""
    checks.run(lambda: reject_mixed_half_dtypes(config))
    if not is_one_of_several:
        checks.run(lambda: reject_eight_bits(config, runtime))
        checks.run(lambda: checked_ramp(config, runtime.world_size))
    for sink in sinks_of(config) if runtime.is_main else ():
        checks.run(partial(sink.check, config))


def _open_model(config: RunConfig, device: torch.device, fetch: Fetch) -> OpenedModel:
    """Find the model's files. The assistant adapter comes first: it is small, so its problems show before the large
    download."""
    file = find_assistant(config.model, fetch)
    family = config.model.family
    assistant = None if file is None else as_assistant(file, open_adapter(file, family).state(), family)
    encoders = encoders_of(config, device, fetch=fetch)
    facts = facts_of(config, encoders.spec, encoders.source)
    if assistant is not None and len(facts.experts) > 1:
        found, expected = f"one for {facts.flavour}, which has two denoisers", "a model with one denoiser"
        raise ConfigError([Problem(ASSISTANT_KEY, found, expected, f"remove {ASSISTANT_KEY}")])
    return OpenedModel(encoders, facts, trained_experts(config.model.experts, facts), assistant)


def _check_distilled(config: RunConfig, model: OpenedModel, view: View) -> None:
    warning = check_distilled(config, model.spec, model.source, model.facts)
    if warning is not None:
        view.warn(warning)


def _plan_copies(config: RunConfig, environment: Environment, machine: Machine, view: View) -> None:
    """Report the size of the copies of remote datasets, and reject copies that do not fit. Downloads nothing."""
    copies = Copies(config, HubAccess.of(environment))
    plans = copies.plans()
    for plan in plans:
        for line in plan.lines():
            view.report(line)
    copies.check(plans, machine.host.headroom)


def _call(make: Callable[[], T]) -> T:
    return make()


def _plan(
    config: RunConfig, machine: Machine, model: OpenedModel, runtime: Runtime, options: RunOptions,
    environment: Environment,
) -> PlannedRun:  # fmt: skip
    return make_plan(
        config, machine, model.spec, model.source, model.facts, model.assistant, processes=processes_of(runtime),
        force_oversubscription=options.force_oversubscription, cache=environment.cache_folder,
    )  # fmt: skip


def _find_beginning(
    config: RunConfig, model: OpenedModel, store: CheckpointStore, folder: RunFolder, options: RunOptions, view: View,
    *, rejected: bool,
) -> _Beginning:  # fmt: skip
    """Find the checkpoint to resume from and compare the run's identity with it.

    The identity takes a digest of all weights, which is slow the first time. A rejected run needs it only if there is a
    checkpoint to compare it with.
    """
    requested = options.resume or config.checkpoints.resume
    skips_identity = rejected and resolve(requested, store)[0] is None and store.latest() is None
    identity = {} if skips_identity else identity_of(config, model.source, model.facts, model.assistant)
    finals = folder.final_files(model.experts, config.adapter.kind)
    finishing = bool(store.unfinished("finishing"))
    start = find_start(
        requested, store, folder, identity, model.trained, allow_other_run=options.allow_other_run,
        is_half_finished=finishing and not folder.has_all(finals),
    )  # fmt: skip
    view.report(start.reason)
    complete = () if finishing else files_if_complete(start, config, folder, finals)
    return _Beginning(identity, start, complete)


def _check_folder(folder: RunFolder, store: CheckpointStore, checks: Checks, *, dry_run: bool, is_main: bool) -> None:
    """Check that no other run uses the folder and that it is writable. The second check needs the first to pass."""
    claim = CheckResult(None) if dry_run else checks.run(store.check_claim)
    if is_main and claim.is_known:
        checks.run(folder.check)


def _take_folder(
    config: RunConfig, folder: RunFolder, store: CheckpointStore, model: OpenedModel, found: _Beginning
) -> ResumeStart:
    """Lock the folder, set aside checkpoints of later steps, and remove what a killed process left."""
    notes = store.begin(found.identity, found.start.checkpoint)
    not_removed = remove_leftovers(config, folder, store, model.experts) if store.is_writer else []
    return replace(found.start, notes=(*found.start.notes, *notes, *not_removed))


def _check_attention(config: RunConfig, model: OpenedModel, planned: PlannedRun, device: torch.device) -> None:
    """Reject an attention kernel that is not installed or does not support this model.

    `load` chooses again, with the data's shapes.
    """
    choose(config, planned, model.spec.attention, device, model.encoders.placement.dtype)


def _check_adapter(config: RunConfig, model: OpenedModel, *, init_from: bool) -> dict[str, tuple[int, ...]]:
    """Check the adapter's layers. `init_from` is False if that file is missing; the other layers are still checked."""
    if not init_from:
        config = config.model_copy(update={"adapter": config.adapter.model_copy(update={"init_from": None})})
    return check_adapter(config, model.spec, model.source, model.facts, model.assistant)
