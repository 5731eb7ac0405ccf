"""Assemble the parts of a run, in the order in which `train.load` and `train.judging` call them: unified memory, cache
resources, the experts' host, the initial training state, the job. `train.preflight` calls the checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from gracetune.adapters.state import ExpertStage
from gracetune.cache.batches import BatchSource, LiveEncoder
from gracetune.cache.errors import EntriesError
from gracetune.cache.folders import cache_folders
from gracetune.cache.required_entries import is_refreshed
from gracetune.cache.residence import CacheResources
from gracetune.config.environment import ALLOCATOR_VARIABLES, Environment
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.data.loader import EpochEnd, Loader
from gracetune.diffusion.weighting import Weighting
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine
from gracetune.memory.arena_size import ArenaRoom
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import Unavailable
from gracetune.memory.placement import Hints, hints_of
from gracetune.memory.transport import (
    FILE,
    TransportChoice,
    choose_transport,
    machine_key,
    measure_link,
    recall,
    remember,
)
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.models.experts import ExpertHost, choose_parking, trained_experts
from gracetune.models.fact_overrides import guidance_note
from gracetune.models.registry import spec_of
from gracetune.models.spec import ExpertName, ModelFacts
from gracetune.models.token_routing import TokenRouter
from gracetune.optim.averages import EmaWeights
from gracetune.optim.batch_ramp import Ramp, ramp_of
from gracetune.optim.build import build_optimizer, optimizer_notes, state_choice
from gracetune.optim.chunked_adamw import ChunkedAdamW, StateChoice
from gracetune.optim.record import ParamGroup
from gracetune.optim.schedules import build_schedule
from gracetune.optim.step_skipping import waiting_note
from gracetune.optim.weight_waits import wait_in
from gracetune.train.control import Control
from gracetune.train.cuda_graphs import Replay
from gracetune.train.data import CachedSamples, local_ranks
from gracetune.train.gradients import (
    FlatGradients,
    GradientClipping,
    Gradients,
    LossScale,
    NoScale,
    ShardedGradients,
    SummedGradients,
)
from gracetune.train.job import TrainingJob
from gracetune.train.planning import PlannedRun
from gracetune.train.runtime import Runtime
from gracetune.train.step import TrainingGoal, TrainStep
from gracetune.train.trained_model import TrainedModel, router_of
from gracetune.train.training_state import Length, TrainingState, length_of
from gracetune.train.view import View


def open_memory(
    config: RunConfig, machine: Machine, runtime: Runtime, environment: Environment, view: View, stack: ExitStack,
    *, managed_elsewhere: int = 0, force_oversubscription: bool = False,
) -> UnifiedMemory | None:  # fmt: skip
    """Open the unified-memory layer if the config asks for any of it. Warn if it is not available.

    `managed_elsewhere` is the managed memory that caches and parked experts will hold, according to the plan.
    """
    if force_oversubscription and (why := _nothing_to_force(config, machine, runtime)):
        view.warn(f"--force-oversubscription: no effect, because {why}")
    hints = hints_of(config)
    if not (config.memory.use_uvm or hints.on):
        return None
    if runtime.device.type != "cuda":
        if config.memory.use_uvm:
            view.warn("memory.use_uvm: not available, this run has no GPU whose memory could overflow")
        if hints.requested:
            view.warn("memory.enable_uvm_hints: not available, this run has no GPU")
        return None
    allocator = next((text for name in ALLOCATOR_VARIABLES if (text := environment.get(name))), "")
    memory = UnifiedMemory.open(
        config.memory,
        machine,
        device=runtime.device.index or 0,
        allocator_string=allocator,
        local_ranks=runtime.local_world_size,
        managed_elsewhere=managed_elsewhere,
        force_oversubscription=force_oversubscription,
    )
    if isinstance(memory, Unavailable):
        view.warn(f"unified memory is not available: {memory}")
        return None
    stack.callback(memory.close)
    view.report(f"overflow arena: {memory.arena_size.reason}")
    if memory.has_arena:
        view.report(f"page faults: {memory.uncounted or 'counted, by CUPTI'}")
    return memory


def _nothing_to_force(config: RunConfig, machine: Machine, runtime: Runtime) -> str | None:
    if runtime.device.type != "cuda":
        return "this run has no GPU whose memory could overflow"
    if not config.memory.use_uvm:
        return "memory.use_uvm is off"
    if ArenaRoom.of(machine, runtime.device.index or 0).cap_reason is None:
        return "the link to the CPU is coherent: managed memory has no cap here"
    return None


def cache_resources(
    config: RunConfig, machine: Machine, runtime: Runtime, environment: Environment, memory: UnifiedMemory | None,
    view: View,
) -> CacheResources:  # fmt: skip
    """The memory that caches may use, and how batches are copied to the device (measured if it is not known)."""
    hints, ranks = hints_of(config), local_ranks(config, runtime)
    on_gpu = runtime.device.type == "cuda"
    heap = memory.heap if memory is not None and hints.on else None
    view.report(f"residency hints: {'off' if heap is None else 'on'}, {_why_hints(hints, memory, on_gpu)}")
    resources = CacheResources(machine, runtime.device.index or 0 if on_gpu else None, heap, ranks=ranks, hints=hints)
    if heap is None:
        resources = replace(resources, no_heap=_why_hints(hints, memory, on_gpu))
    unified = "unified_memory" in (config.cache.vae_cache_type, config.cache.text_cache_type)
    managed = heap if unified and ranks is None else None
    folder = environment.cache_folder or cache_folders(config).base
    choice = transport_of(
        resources,
        folder,
        managed,
        managed_requested=hints.requested and managed is not None,
        is_main=runtime.is_main,
    )
    view.report(f"batches: {choice.transport}, {choice.reason}")
    return replace(resources, transport=choice)


def _why_hints(hints: Hints, memory: UnifiedMemory | None, on_gpu: bool) -> str:
    if not hints.on or memory is not None:
        return hints.reason
    return "unified memory is not available here" if on_gpu else "this run has no GPU"


def transport_of(
    resources: CacheResources,
    folder: Path,
    heap: ManagedHeap | None,
    *,
    managed_requested: bool = False,
    is_main: bool = True,
) -> TransportChoice:
    """Choose the transport by the speeds measured on this machine, now or earlier. `folder` keeps the measurement."""
    profile = resources.profile
    if resources.device is None or profile == "integrated":
        return choose_transport(profile, None)
    request = "managed memory was requested (memory.enable_uvm_hints is true)" if managed_requested else None
    key = machine_key(resources.machine, resources.device)
    measured, source = recall(folder, key, with_managed=heap is not None), f"measured before ({folder / FILE})"
    if measured is None:
        try:
            measured = measure_link(resources.device, heap)
        except (UnifiedMemoryError, RuntimeError) as error:  # torch raises a RuntimeError if pinning memory fails
            choice = choose_transport(profile, None, request=request)
            return replace(choice, reason=f"{choice.reason}; not measured ({str(error).splitlines()[0]})")
        failed = remember(folder, key, measured) if is_main else None
        source = f"measured in {measured.seconds:.2f} s" + (f", not kept: {failed}" if failed else "")
    speeds = measured.speeds if heap is not None else replace(measured.speeds, managed=None)
    choice = choose_transport(profile, speeds, request=request)
    return replace(choice, reason=f"{choice.reason}; {source}")


def open_host(
    config: RunConfig, planned: PlannedRun, machine: Machine, runtime: Runtime, memory: UnifiedMemory | None,
    facts: ModelFacts,
) -> ExpertHost:  # fmt: skip
    """Choose where inactive experts wait, and open the host that moves them."""
    count = len(trained_experts(config.model.experts, facts))
    profile = machine.profile.value if runtime.device.type == "cuda" else "cpu"
    # `enable_uvm_hints: false` also excludes parked weights: they would be managed memory with a preferred location.
    heap = None if memory is None or config.memory.enable_uvm_hints is False else memory.heap
    choice = choose_parking(profile, park=planned.parks_experts, experts=count, managed=heap is not None)
    blocks = spec_of(facts.family).repeated_blocks
    return ExpertHost.open(choice, runtime.device, heap=heap, spare=planned.step_bytes, blocks=blocks)


def check_objective(config: RunConfig, facts: ModelFacts, trained: Sequence[ExpertName]) -> None:
    """Reject noise levels and loss weights that this model does not support."""
    TrainingGoal.from_config(config.objective, facts, trained)
    Weighting.from_config(config.objective, facts.schedule)


@dataclass(frozen=True, eq=False)
class InitialState:
    """A run at step 0. `resume.restore` loads a checkpoint into its state."""

    state: TrainingState
    ramp: Ramp
    length: Length
    goal: TrainingGoal


def build_initial_state(
    config: RunConfig, trained_model: TrainedModel, index: DataIndex, runtime: Runtime, view: View,
    state: StateChoice | None = None,
) -> InitialState:  # fmt: skip
    """Build the optimizer and all other training state, and compute the length of the run.

    `state` overrides where the config puts the optimizer's state.
    """
    training = config.training
    ramp = checked_ramp(config, runtime.world_size)
    if runtime.is_sharded:
        view.report(f"weights are spread over {runtime.world_size} processes (FSDP2)")
    if ramp.first_line is not None:
        view.report(ramp.first_line)
        logging.getLogger("gracetune").info(ramp.first_line)
    length = length_of(
        index, ramp, batch_size=training.batch_size, max_steps=training.max_steps, epochs=training.epochs
    )
    loader = Loader(
        index, batch_size=training.batch_size, rank=runtime.rank, world_size=runtime.world_size,
        epochs=training.epochs,
    )  # fmt: skip
    groups = trained_model.groups()
    optimizer = build_optimizer(config.optimizer, groups, state or state_choice(config.optimizer.state))
    if isinstance(optimizer, ChunkedAdamW):
        view.report(optimizer.line)
        for name in trained_model.trained:
            wait_in(trained_model.host.module(name), trained_model.spec.repeated_blocks, optimizer)
    scheduled = build_schedule(
        optimizer, config.schedule, optimizer_name=config.optimizer.name, total=length.steps
    )  # fmt: skip
    waiting = waiting_note(optimizer, f"optimizer {config.optimizer.name}", runtime.device)
    goal = TrainingGoal.from_config(config.objective, trained_model.facts, trained_model.trained)
    weighting = Weighting.from_config(config.objective, trained_model.facts.schedule)
    about = (*trained_model.notes, *optimizer_notes(config.optimizer, groups), *scheduled.notes)
    for note in (*about, weighting.warning, guidance_note(config, trained_model.facts), waiting):
        if note is not None:
            view.warn(note)
    for dataset in config.datasets:
        if dataset.regularisation and not dataset.disabled and config.adapter.is_full_finetune:
            view.warn(whole_model_note(dataset.id))
    scale = LossScale(runtime.device) if training.mixed_precision == "fp16" else NoScale()
    ema = EmaWeights.from_config(trained_model.parameters(), training.ema)
    return InitialState(
        TrainingState(optimizer, scheduled.scheduler, scale, ema, loader, runtime.device), ramp, length, goal
    )  # fmt: skip


def assemble(
    config: RunConfig, trained_model: TrainedModel, cached: CachedSamples, live: LiveEncoder, initial: InitialState,
    source: BatchSource,
    runtime: Runtime, memory: UnifiedMemory | None, control: Control, view: View, *,
    on_epoch_end: Callable[[EpochEnd], None], memory_alarm: Callable[[], str | None],
    repair: Callable[[EntriesError], None],
) -> TrainingJob:  # fmt: skip
    """Build the training job from the loaded parts."""
    training = config.training
    optimizer = initial.state.optimizer
    gradients = {name: _gradients(trained_model, name, optimizer, runtime) for name in trained_model.trained}
    router = router_of(
        config, trained_model.spec, trained_model.facts, trained_model.host.module(trained_model.trained[0])
    )
    step = TrainStep(
        trained_model.spec, trained_model.facts, initial.goal, seed=training.seed, dtype=trained_model.dtype,
        autocast=runtime.autocast,
        base=trained_model.base_for,
        replay=_replay(config, trained_model, gradients, cached, live, memory, runtime, view, router), router=router,
    )  # fmt: skip
    return TrainingJob(
        runtime=runtime,
        trained_model=trained_model,
        step=step,
        state=initial.state,
        source=source,
        ramp=initial.ramp,
        switch_every=config.model.switch_experts_every,
        seed=training.seed,
        gradients=gradients,
        length=initial.length,
        clip=GradientClipping(training.grad_clip, training.max_grad_norm),
        accumulation=training.accumulation,
        repair=repair,
        warn=view.warn,
        on_epoch_end=on_epoch_end,
        memory_alarm=memory_alarm,
        control=control,
        first_step=initial.state.position.step,
    )


def _gradients(
    trained_model: TrainedModel, expert: ExpertName, optimizer: Optimizer, runtime: Runtime
) -> Gradients:  # fmt: skip
    parameters = trained_model.parameters(expert)
    if runtime.is_sharded:
        return ShardedGradients(parameters, runtime.world_size)
    reduce = runtime.sum_ if runtime.world_size > 1 else None
    if isinstance(optimizer, ChunkedAdamW):
        number = trained_model.trained.index(expert)  # one param group for each expert, in this order
        return SummedGradients(
            optimizer.sums[number], reduce, load_ahead=partial(optimizer.load_ahead, number)
        )  # fmt: skip
    return FlatGradients(parameters, reduce)


def _replay(
    config: RunConfig, trained_model: TrainedModel, gradients: Mapping[ExpertName, Gradients], cached: CachedSamples,
    live: LiveEncoder,
    memory: UnifiedMemory | None, runtime: Runtime, view: View, router: TokenRouter | None,
) -> Replay | None:  # fmt: skip
    """CUDA graphs, for runs whose steps run the same kernels on the same addresses, without other work on the GPU."""
    if runtime.device.type != "cuda":
        return None
    reasons = {
        "weights are spread over processes": runtime.is_sharded,
        # The arena's blocks move under memory pressure. (Hints and caches in managed memory do not affect a step's own
        # memory.)
        "the overflow arena is in use": memory is not None and memory.has_arena,
        "samples are encoded on the GPU beside the training": live.latents is not None or is_refreshed(cached.index),
    }
    why = next((why for why, holds in reasons.items() if holds), None) or why_not_captured(config, trained_model)
    if why is not None:
        view.report(f"CUDA graph: off: {why}")
        return None
    flat = {trained_model.host.module(name): one for name, one in gradients.items() if isinstance(one, FlatGradients)}
    return Replay(trained_model.spec if router is None else router.spec, flat, report=view.report)


def why_not_captured(config: RunConfig, trained_model: TrainedModel) -> str | None:
    """Why this model is not captured in CUDA graphs; None if it can be."""
    adapter, prepared = config.adapter, trained_model.prepared.values()
    varying = config.keeps_masked_tokens
    drops = [adapter.dropout, *(options.get("dropout") for options in adapter.by_module.values())]
    reasons = {
        f"{trained_model.facts.family} has not been captured on a GPU yet": trained_model.spec.graph_inputs is None,
        "blocks are not compiled": not all(one.compiled for one in prepared),
        "blocks are computed again as a whole in the backward pass": any(one.recomputes for one in prepared),
        "a full fine-tune's gradients would be there twice": adapter.is_full_finetune,
        "the adapter has dropout": any(drops),
        "datasets have strengths of their own": bool(trained_model.strengths),
        "experts leave the GPU": trained_model.host.moves,
        "token routing keeps masked tokens, and every batch has another number of them": varying,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def whole_model_note(dataset: str) -> str:
    return (
        f"dataset {dataset} is regularisation data, but a full fine-tune keeps no base model whose prediction "
        "could be the target: it is trained on like any other dataset, with its loss_weight"
    )


def reject_mixed_half_dtypes(config: RunConfig) -> None:
    """Reject bf16 autocast over fp16 weights, and the reverse: torch's autocast does not mix the two types."""
    mixed = config.training.mixed_precision
    held = {"fp8": "bf16", "int8": mixed, "auto": mixed}.get(config.model.base_precision, config.model.base_precision)
    if {held, mixed} == {"bf16", "fp16"}:
        found = f"{mixed}, with base weights that compute in {held}"
        hint = f"--set training.mixed_precision={held}"
        raise ConfigError([Problem("training.mixed_precision", found, f"{held}, or fp32", hint)])


def check_optimizer(config: RunConfig, trained: Sequence[ExpertName], device: torch.device) -> Optimizer:
    """Build the optimizer on dummy parameters: reject one that is not installed or does not accept its settings.

    Also reject a schedule that does not fit into the run, if the number of steps is known. Returns the dummy.
    """
    optimizer = build_optimizer(
        config.optimizer,
        [
            ParamGroup(name, cast(ExpertStage, name), {f"{name}.one": nn.Parameter(torch.zeros(1, 1, device=device))})
            for name in trained
        ],
        state_choice(config.optimizer.state),
    )
    steps = config.training.max_steps
    if steps is not None:
        build_schedule(optimizer, config.schedule, optimizer_name=config.optimizer.name, total=steps)
    return optimizer


def checked_ramp(config: RunConfig, world_size: int) -> Ramp:
    """The batch ramp. Reject a target that cannot be divided evenly among the processes."""
    ramp = ramp_of(config.training, world_size)
    target = config.training.ramp.target_effective_batch_size
    if config.training.ramp.enabled and target is not None and target % world_size:
        near = max(1, target // world_size) * world_size
        key = "training.ramp.target_effective_batch_size"
        expected = f"a multiple of {world_size}, one share for each process"
        raise ConfigError([Problem(key, str(target), expected, f"--set {key}={near}")])
    return ramp
