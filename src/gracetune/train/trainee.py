"""The model that is trained: its denoisers loaded, made trainable, and given their places.

trainee = load_trainee(config, source, runtime, choices)
trainee.parameters()                     # by names that are the same in every run, expert first
trainee.host.activate("high_noise")      # the denoiser whose turn it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from gracetune.adapters.attach import Attached, PathChoice, attach
from gracetune.adapters.opening import open_adapter
from gracetune.adapters.state import AdapterState, Stage
from gracetune.cache.batches import Batch
from gracetune.config.run_config import RunConfig
from gracetune.config.token_routes import resolve_routes
from gracetune.errors import ConfigError, Problem
from gracetune.models.activation_parking import ActivationParking
from gracetune.models.experts import ExpertHost, trained_experts
from gracetune.models.fp8_loading import fp8_line
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ExpertName, Fp8, Fp8Layouts, ModelFacts, ModelSpec, Placement
from gracetune.models.token_routing import TokenRouter, block_lists, install
from gracetune.optim.build import parameter_names
from gracetune.optim.record import ParamGroup
from gracetune.train.blocks import Preparation, Shapes, prepare_blocks
from gracetune.train.runtime import Runtime
from gracetune.units import format_duration

_BASES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.bfloat16,  # but for the layers of `Placement.fp8`
}


@dataclass(frozen=True)
class Choices:
    """How the denoisers are run: decided before any is loaded, each with its reason elsewhere."""

    checkpointing: bool = False
    memory_budget: float | None = None
    """Of activations kept by compiled blocks; None leaves it to torch."""
    compiled: bool = False
    attention: str | None = None
    adapter_path: PathChoice = "auto"
    """`library` computes adapters as peft and LyCORIS do: the reference the quick forms are held against."""
    fp8_layouts: Fp8Layouts = "both"
    """Of base weights in fp8, where the config asks for those."""
    park_inputs: bool = False
    """Inputs of checkpointed blocks wait in host memory."""
    shapes: Shapes = "several"
    """Of the samples: compiled graphs are made for one, or for any."""


@dataclass(frozen=True, eq=False)
class Trainee:
    spec: ModelSpec
    source: ModelSource
    facts: ModelFacts
    host: ExpertHost
    attached: Mapping[ExpertName, Attached]
    """Of every trained expert, in the order of their turns."""
    dtype: torch.dtype
    """What a denoiser is given and computes in outside autocast."""
    strengths: Mapping[str, float]
    """Of datasets that are learnt with another than 1."""
    regularised: frozenset[str] = frozenset()
    """Datasets on which the base model's own answer is learnt (`datasets[].regularisation`)."""
    held: tuple[str, ...] = ()
    """In words, where the base weights are not simply in one precision."""
    prepared: Mapping[ExpertName, Preparation] = field(default_factory=dict)
    parking: ActivationParking | None = None
    """Of blocks' inputs, one for all experts: they take turns."""

    @property
    def trained(self) -> tuple[ExpertName, ...]:
        return tuple(self.attached)

    def parameters(self, expert: ExpertName | None = None) -> dict[str, nn.Parameter]:
        """Everything that is trained, or one expert's part of it."""
        chosen = self.trained if expert is None else (expert,)
        return {name: cast(nn.Parameter, one) for name, one in parameter_names(self.groups(chosen)).items()}

    def groups(self, experts: Sequence[ExpertName] | None = None) -> list[ParamGroup]:
        """As an optimizer wants them: one for each expert."""
        return [
            ParamGroup(name, cast(Stage, name), self.attached[name].parameters())
            for name in (self.trained if experts is None else experts)
        ]

    @property
    def decisions(self) -> tuple[str, ...]:
        """How weights are held and adapters computed, a line for each way; experts mostly say the same."""
        return tuple(dict.fromkeys((*self.held, *(line for one in self.attached.values() for line in one.decisions))))

    @property
    def notes(self) -> tuple[str, ...]:
        """Adapter options that have no effect on this model."""
        return tuple(dict.fromkeys(line for one in self.attached.values() for line in one.notes))

    @property
    def compiling(self) -> str | None:
        """What compiling took so far; None where nothing was."""
        stats = [one.stats for one in self.prepared.values()]
        graphs, seconds = sum(one.graphs for one in stats), sum(one.seconds for one in stats)
        return f"torch.compile: {graphs} graphs in {format_duration(seconds)}, once" if graphs else None

    def components(self) -> dict[str, nn.Module]:
        """For a pipeline: the denoisers by diffusers' names."""
        experts = {expert.name: expert for expert in self.facts.experts}
        return {experts[name].component: self.host.module(name) for name in self.trained}

    @contextmanager
    def strength_for(self, batch: Batch, expert: ExpertName) -> Iterator[None]:
        """All samples of a batch are of one dataset."""
        strength = self.strengths.get(batch.ref.samples[0].dataset, 1.0)
        if strength == 1.0:
            yield
            return
        with self.attached[expert].scale(strength):
            yield

    def base_for(self, batch: Batch, expert: ExpertName) -> AbstractContextManager[None] | None:
        """In here the denoiser is the base model; None where a batch is not to learn what that answers."""
        if batch.ref.samples[0].dataset not in self.regularised:
            return None
        return self.attached[expert].disabled()

    @contextmanager
    def evaluating(self, strength: float = 1.0) -> Iterator[None]:
        """No gradients, no dropout, the adapters at this strength; afterwards as before."""
        modes = [(module, module.training) for name in self.trained for module in self.host.module(name).modules()]
        with ExitStack() as stack, torch.no_grad():
            if strength != 1.0:
                for attached in self.attached.values():
                    stack.enter_context(attached.scale(strength))
            for module, _ in modes:
                module.training = False
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training


def check_routes(config: RunConfig, spec: ModelSpec, source: ModelSource, facts: ModelFacts) -> None:
    """Token routes that these weights cannot have: all denoisers of a model have as many blocks."""
    routes = config.training.token_routing.routes
    if routes:
        denoiser = spec.build_denoiser(source, facts.experts[0])
        resolve_routes(routes, sum(map(len, block_lists(denoiser, spec.family))))


def router_of(config: RunConfig, spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module) -> TokenRouter | None:
    """None where no token skips a block."""
    blocks = sum(map(len, block_lists(denoiser, spec.family)))
    routes = resolve_routes(config.training.token_routing.routes, blocks)
    return TokenRouter(spec, routes, facts, config.training.seed) if routes else None


def check_adapter(
    config: RunConfig, spec: ModelSpec, source: ModelSource, facts: ModelFacts
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Targets that name nothing, and a file to begin with that does not fit, are errors before anything is encoded or
    loaded: all that will be attached is, to layers without weights. Returns the shape of every trained parameter."""
    starts = _starts(config, facts)
    groups = []
    for expert in facts.experts:
        if expert.name in trained_experts(config.model.experts, facts):
            attached = _made_trainable(config, spec, facts, spec.build_denoiser(source, expert), expert)
            if expert.name in starts:
                attached.load(starts[expert.name])
            groups.append(ParamGroup(expert.name, cast(Stage, expert.name), attached.parameters()))
    return {name: tuple(parameter.shape) for name, parameter in parameter_names(groups).items()}


def load_trainee(
    config: RunConfig,
    spec: ModelSpec,
    source: ModelSource,
    facts: ModelFacts,
    runtime: Runtime,
    choices: Choices,
    host: ExpertHost,
) -> Trainee:
    """One expert after the other: loaded, adapter attached, sharded, parked."""
    fp8 = Fp8(spec.default_targets, choices.fp8_layouts) if config.model.base_precision == "fp8" else None
    placement = Placement(runtime.device, _BASES[config.model.base_precision], choices.attention, fp8)
    starts = _starts(config, facts)
    experts = {expert.name: expert for expert in facts.experts}
    attached: dict[ExpertName, Attached] = {}
    prepared: dict[ExpertName, Preparation] = {}
    parking = ActivationParking.on(runtime.device) if choices.park_inputs else None
    held: list[str] = []
    routed = bool(config.training.token_routing.routes)
    for name in trained_experts(config.model.experts, facts):
        denoiser = spec.load_denoiser(source, experts[name], placement)
        if fp8 is not None:
            held.append(fp8_line(denoiser, fp8.layers))
        attached[name] = _made_trainable(config, spec, facts, denoiser, experts[name], choices.adapter_path)
        if name in starts:
            attached[name].load(starts[name])
        denoiser.train()
        prepared[name] = prepare_blocks(
            denoiser, spec.repeated_blocks, checkpointing=choices.checkpointing, compiled=choices.compiled,
            budget=choices.memory_budget, shapes=choices.shapes, parking=parking, routed=routed,
        )  # fmt: skip
        if routed:
            install(denoiser, spec.family)
        if runtime.is_sharded:
            runtime.shard(denoiser, spec.repeated_blocks)
        else:
            runtime.same_everywhere_(parameter.data for parameter in attached[name].parameters().values())
        host.add(name, denoiser)
    strengths = {one.id: one.adapter_strength for one in config.datasets if one.adapter_strength != 1.0}
    whole = config.adapter.kind == "full_finetune"
    dtype = torch.float32 if whole else placement.dtype
    regularised = frozenset(one.id for one in config.datasets if one.regularisation and not whole)
    return Trainee(spec, source, facts, host, attached, dtype, strengths, regularised, tuple(held), prepared, parking)


def _made_trainable(
    config: RunConfig, spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module, expert: Expert,
    adapter_path: PathChoice = "auto",
) -> Attached:  # fmt: skip
    return attach(
        denoiser,
        config.adapter,
        family=spec.family,
        stage=cast(Stage, expert.name),
        default_targets=spec.default_targets,
        conv_targets=spec.conv_targets,
        untrained=(*spec.untrained, *facts.untrained),
        seed=config.training.seed,
        adapter_path=adapter_path,
    )


def _starts(config: RunConfig, facts: ModelFacts) -> dict[ExpertName, AdapterState]:
    """The adapters of `init_from`, by expert: one file, or the folder or first file of a pair."""
    if config.adapter.init_from is None:
        return {}
    path = Path(config.adapter.init_from).expanduser()
    states = [state for file in _pair(path) for state in open_adapter(file, facts.family).states()]
    found: dict[ExpertName, AdapterState] = {state.stage: state for state in states}
    if "" in found and len(facts.experts) > 1:
        found = {name: replace(found[""], stage=cast(Stage, name)) for name in trained_experts("both", facts)}
    missing = [name for name in trained_experts(config.model.experts, facts) if name not in found]
    if missing:
        there = ", ".join(found) or "no expert's layers"
        other = "low" if missing[0] == "high_noise" else "high"
        hint = f"give a file for {missing[0]} beside it, or --set model.experts={other}"
        raise ConfigError([Problem("adapter.init_from", there, ", ".join(missing), hint, str(path))])
    return found


def _pair(path: Path) -> Sequence[Path]:
    from gracetune.adapters.metadata import other_stage

    other = other_stage(path)
    return (path, other) if other is not None and other.is_file() else (path,)
