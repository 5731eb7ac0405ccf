"""The model that is trained: its denoisers loaded, made trainable, and given their places.

trainee = load_trainee(config, source, runtime, choices)
trainee.parameters()                     # by names that are the same in every run, expert first
trainee.host.activate("high_noise")      # the denoiser whose turn it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.assistant import Assistant, AssistantFile, assist
from gracetune.adapters.attach import Attached, PathChoice, attach
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.cache.batches import Batch
from gracetune.config.run_config import RunConfig
from gracetune.config.token_routes import resolve_routes
from gracetune.errors import ConfigError, Problem
from gracetune.models.activation_parking import ActivationParking
from gracetune.models.eight_bit_layers import eight_bit_line
from gracetune.models.experts import ExpertHost, trained_experts
from gracetune.models.source import ModelSource
from gracetune.models.spec import EightBitLayers, Expert, ExpertName, Fp8Layouts, ModelFacts, ModelSpec, PartPlacement
from gracetune.models.token_routing import TokenRouter, block_lists, install
from gracetune.optim.build import parameter_names
from gracetune.optim.record import ParamGroup
from gracetune.train.blocks import Preparation, Shapes, prepare_blocks
from gracetune.train.export_checks import reject_misread_files
from gracetune.train.runtime import Runtime
from gracetune.units import format_duration

_BASES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BasePrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8"]


@dataclass(frozen=True)
class DenoiserChoices:
    """How the denoisers are run: decided before any is loaded, each with its reason elsewhere."""

    checkpointing: bool = False
    memory_budget: float | None = None
    """Of activations kept by compiled blocks; None leaves it to torch."""
    compiled: bool = False
    attention: str | None = None
    adapter_path: PathChoice = "auto"
    """`library` computes adapters as peft and LyCORIS do: the reference the quick forms are held against."""
    base_precision: BasePrecision | None = None
    """How the frozen weights are held; None: as the config says."""
    fp8_layouts: Fp8Layouts = "both"
    """Of base weights in fp8, where the config asks for those."""
    park_inputs: bool = False
    """Inputs of checkpointed blocks wait in host memory."""
    shapes: Shapes = "several"
    """Of the samples: compiled graphs are made for one, or for any."""


@dataclass(frozen=True, eq=False)
class TrainedModel:
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
    assistant: Assistant | None = None

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
            ParamGroup(name, cast(ExpertStage, name), self.attached[name].parameters())
            for name in (self.trained if experts is None else experts)
        ]

    @property
    def decisions(self) -> tuple[str, ...]:
        """How weights are held and adapters computed, a line for each way; experts mostly say the same."""
        lines = (line for one in self.attached.values() for line in one.decisions)
        assistant = () if self.assistant is None else (self.assistant.line,)
        return tuple(dict.fromkeys((*self.held, *assistant, *lines)))

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

    def unassisted(self) -> AbstractContextManager[None]:
        """In here the model is what the trained adapter will be used with."""
        return nullcontext() if self.assistant is None else self.assistant.absent()

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
    routes = resolve_routes(config.training.token_routing.routes, blocks) if config.skips_blocks else ()
    return TokenRouter(spec, routes, facts, config.training.seed) if routes else None


def check_adapter(
    config: RunConfig, spec: ModelSpec, source: ModelSource, facts: ModelFacts, assistant: AssistantFile | None = None
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Targets that name nothing, and a file to begin with that does not fit, are errors before anything is encoded or
    loaded: all that will be attached is, to layers without weights. Returns the shape of every trained parameter."""
    starts = _starts(config, facts)
    groups = []
    for expert in facts.experts:
        if expert.name in trained_experts(config.model.experts, facts):
            denoiser = spec.build_denoiser(source, expert)
            if assistant is not None:
                assist(denoiser, assistant, torch.device("meta"), torch.bfloat16)
            attached = _made_trainable(config, spec, facts, denoiser, expert)
            if expert.name in starts:
                attached.load(starts[expert.name])
            layout = attached.layout()
            if layout is not None:
                reject_misread_files(layout, config.checkpoints)
            groups.append(ParamGroup(expert.name, cast(ExpertStage, expert.name), attached.parameters()))
    return {name: tuple(parameter.shape) for name, parameter in parameter_names(groups).items()}


def load_trained_model(
    config: RunConfig,
    spec: ModelSpec,
    source: ModelSource,
    facts: ModelFacts,
    runtime: Runtime,
    choices: DenoiserChoices,
    host: ExpertHost,
    assistant: AssistantFile | None = None,
) -> TrainedModel:
    """One expert after the other: loaded, adapter attached, sharded, parked. An assistant is for a single one."""
    placement = _placement(config, spec, runtime, choices)
    starts = _starts(config, facts)
    experts = {expert.name: expert for expert in facts.experts}
    attached: dict[ExpertName, Attached] = {}
    prepared: dict[ExpertName, Preparation] = {}
    parking = ActivationParking.on(runtime.device) if choices.park_inputs else None
    held: list[str] = []
    assisting: Assistant | None = None
    routed = config.skips_blocks
    for name in trained_experts(config.model.experts, facts):
        denoiser = spec.load_denoiser(source, experts[name], placement)
        if placement.eight_bits is not None:
            held.append(eight_bit_line(denoiser, placement.eight_bits.layers))
        if assistant is not None:
            assisting = assist(denoiser, assistant, runtime.device, placement.dtype)
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
    return TrainedModel(
        spec, source, facts, host, attached, dtype, strengths, regularised, tuple(held), prepared, parking, assisting
    )  # fmt: skip


def _placement(config: RunConfig, spec: ModelSpec, runtime: Runtime, choices: DenoiserChoices) -> PartPlacement:
    """Beside the layers in 8 bits everything is in 16; next to int8 in those that the run computes in."""
    precision = choices.base_precision or config.model.base_precision
    if precision == "fp8":
        held = EightBitLayers(spec.default_targets, choices.fp8_layouts)
        return PartPlacement(runtime.device, torch.bfloat16, choices.attention, held)
    if precision == "int8":
        dtype = torch.float16 if config.training.mixed_precision == "fp16" else torch.bfloat16
        return PartPlacement(
            runtime.device, dtype, choices.attention, EightBitLayers(spec.default_targets, kind="int8")
        )
    return PartPlacement(runtime.device, _BASES[precision], choices.attention)


def _made_trainable(
    config: RunConfig, spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module, expert: Expert,
    adapter_path: PathChoice = "auto",
) -> Attached:  # fmt: skip
    return attach(
        denoiser,
        config.adapter,
        family=spec.family,
        expert=cast(ExpertStage, expert.name),
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
    found: dict[ExpertName, AdapterState] = {state.expert: state for state in states}
    if "" in found and len(facts.experts) > 1:
        found = {name: replace(found[""], expert=cast(ExpertStage, name)) for name in trained_experts("both", facts)}
    missing = [name for name in trained_experts(config.model.experts, facts) if name not in found]
    if missing:
        found_names = ", ".join(found) or "no expert's layers"
        other = "low" if missing[0] == "high_noise" else "high"
        hint = f"give a file for {missing[0]} beside it, or --set model.experts={other}"
        raise ConfigError([Problem("adapter.init_from", found_names, ", ".join(missing), hint, str(path))])
    return found


def _pair(path: Path) -> Sequence[Path]:
    from gracetune.adapters.metadata import other_expert_file

    other = other_expert_file(path)
    return (path, other) if other is not None and other.is_file() else (path,)
