"""The trained model: its denoisers, loaded and placed, with their adapters attached.

model = load_trained_model(config, spec, source, facts, runtime, choices, host)
model.parameters()                     # name -> parameter; names are stable across runs and begin with the expert
model.host.activate("high_noise")      # the denoiser of this step, on the device
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
from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.computation import AdapterPath
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
    """How the denoisers are executed, chosen before any of them is loaded (`gracetune.train.planning.choose`)."""

    checkpointing: bool = False
    memory_budget: float | None = None
    """Share of the activations that compiled blocks keep, from 0 to 1; None uses torch's default."""
    compiled: bool = False
    attention: str | None = None
    """diffusers' name of the attention backend; None uses its default."""
    adapter_path: AdapterPath = "auto"
    """`reference` computes adapters as peft and LyCORIS do; the fast implementations are compared with it."""
    base_precision: BasePrecision | None = None
    """Precision of the frozen weights; None takes the config's."""
    fp8_layouts: Fp8Layouts = "both"
    """Which layouts of fp8 base weights are kept."""
    park_inputs: bool = False
    """Keep the inputs of checkpointed blocks in host memory until the backward pass."""
    shapes: Shapes = "several"
    """For which sample shapes graphs are compiled."""


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The denoisers of a run with their adapters, ready to train."""

    spec: ModelSpec
    source: ModelSource
    facts: ModelFacts
    host: ExpertHost
    attached: Mapping[ExpertName, Attached]
    """Adapters by trained expert, in the order in which the experts are trained."""
    dtype: torch.dtype
    """Dtype of a denoiser's inputs, and of its computation outside autocast."""
    strengths: Mapping[str, float]
    """Adapter strength by dataset, where it is not 1."""
    regularised: frozenset[str] = frozenset()
    """Datasets whose target is the base model's prediction (`datasets[].regularisation`)."""
    eight_bit_lines: tuple[str, ...] = ()
    """Lines that describe base weights held in 8 bits."""
    prepared: Mapping[ExpertName, Preparation] = field(default_factory=dict)
    parking: ActivationParking | None = None
    """Host memory for blocks' inputs. One serves all experts, because only one is active at a time."""
    assistant: Assistant | None = None
    """A fixed adapter that is active in training and in held-out losses, and absent from generated images."""

    @property
    def trained(self) -> tuple[ExpertName, ...]:
        return tuple(self.attached)

    def parameters(self, expert: ExpertName | None = None) -> dict[str, nn.Parameter]:
        """All trained parameters by name, or those of one expert."""
        chosen = self.trained if expert is None else (expert,)
        return {name: cast(nn.Parameter, one) for name, one in parameter_names(self.groups(chosen)).items()}

    def groups(self, experts: Sequence[ExpertName] | None = None) -> list[ParamGroup]:
        """Parameter groups for the optimizer, one for each expert."""
        return [
            ParamGroup(name, cast(ExpertStage, name), self.attached[name].parameters())
            for name in (self.trained if experts is None else experts)
        ]

    @property
    def decisions(self) -> tuple[str, ...]:
        """Lines that say how weights are held and adapters are computed, without repetitions."""
        lines = (line for one in self.attached.values() for line in one.decisions)
        assistant = () if self.assistant is None else (self.assistant.line,)
        return tuple(dict.fromkeys((*self.eight_bit_lines, *assistant, *lines)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about adapter options that have no effect on this model."""
        return tuple(dict.fromkeys(line for one in self.attached.values() for line in one.notes))

    @property
    def compiling(self) -> str | None:
        """A line about the compiled graphs so far; None if there are none."""
        stats = [one.stats for one in self.prepared.values()]
        graphs, seconds = sum(one.graphs for one in stats), sum(one.seconds for one in stats)
        return f"torch.compile: {graphs} graphs in {format_duration(seconds)}, once" if graphs else None

    def components(self) -> dict[str, nn.Module]:
        """The trained denoisers by their names in a diffusers pipeline."""
        experts = {expert.name: expert for expert in self.facts.experts}
        return {experts[name].component: self.host.module(name) for name in self.trained}

    @contextmanager
    def strength_for(self, batch: Batch, expert: ExpertName) -> Iterator[None]:
        """Scale the adapter by the strength of the batch's dataset. All samples of a batch come from one dataset."""
        strength = self.strengths.get(batch.ref.samples[0].dataset, 1.0)
        if strength == 1.0:
            yield
            return
        with self.attached[expert].with_strength(strength):
            yield

    def base_for(self, batch: Batch, expert: ExpertName) -> AbstractContextManager[None] | None:
        """A context in which the denoiser is the base model, if the batch's target is that model's prediction."""
        if batch.ref.samples[0].dataset not in self.regularised:
            return None
        return self.attached[expert].disabled()

    def unassisted(self) -> AbstractContextManager[None]:
        """A context without the assistant adapter: the model that the trained adapter will be used with."""
        return nullcontext() if self.assistant is None else self.assistant.absent()

    @contextmanager
    def evaluating(self, strength: float = 1.0) -> Iterator[None]:
        """A context without gradients and dropout, with all adapters at `strength`. Restores all modes afterwards."""
        modes = [(module, module.training) for name in self.trained for module in self.host.module(name).modules()]
        with ExitStack() as stack, torch.no_grad():
            if strength != 1.0:
                for attached in self.attached.values():
                    stack.enter_context(attached.with_strength(strength))
            for module, _ in modes:
                module.training = False
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training


def check_routes(config: RunConfig, spec: ModelSpec, source: ModelSource, facts: ModelFacts) -> None:
    """Reject token routes that name blocks the model does not have."""
    routes = config.training.token_routing.routes
    if routes:
        denoiser = spec.build_denoiser(source, facts.experts[0])  # all experts have the same number of blocks
        resolve_routes(routes, sum(map(len, block_lists(denoiser, spec.family))))


def router_of(config: RunConfig, spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module) -> TokenRouter | None:
    """The router of tokens that skip blocks; None if none do."""
    blocks = sum(map(len, block_lists(denoiser, spec.family)))
    routes = resolve_routes(config.training.token_routing.routes, blocks) if config.skips_blocks else ()
    return TokenRouter(spec, routes, facts, config.training.seed) if routes else None


def check_adapter(
    config: RunConfig, spec: ModelSpec, source: ModelSource, facts: ModelFacts, assistant: AssistantFile | None = None
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Attach all adapters to denoisers on the meta device, and return the shape of every trained parameter.

    This rejects targets that match no layer, an `init_from` file that does not fit, and files that other programs would
    misread, before anything is encoded or loaded.
    """
    initial = _initial_adapters(config, facts)
    groups = []
    for expert in facts.experts:
        if expert.name in trained_experts(config.model.experts, facts):
            denoiser = spec.build_denoiser(source, expert)
            if assistant is not None:
                assist(denoiser, assistant, torch.device("meta"), torch.bfloat16)
            attached = _attach_adapter(config, spec, facts, denoiser, expert)
            if expert.name in initial:
                attached.load(initial[expert.name])
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
    """Load the denoisers one after the other: weights, adapter, prepared blocks, sharding, placement by `host`.

    An assistant is supported for models with one denoiser only (`preflight` rejects others).
    """
    placement = _placement(config, spec, runtime, choices)
    initial = _initial_adapters(config, facts)
    experts = {expert.name: expert for expert in facts.experts}
    attached: dict[ExpertName, Attached] = {}
    prepared: dict[ExpertName, Preparation] = {}
    parking = ActivationParking.on(runtime.device) if choices.park_inputs else None
    eight_bit_lines: list[str] = []
    assisting: Assistant | None = None
    routed = config.skips_blocks
    for name in trained_experts(config.model.experts, facts):
        denoiser = spec.load_denoiser(source, experts[name], placement)
        if placement.eight_bits is not None:
            eight_bit_lines.append(eight_bit_line(denoiser, placement.eight_bits.layers))
        if assistant is not None:
            assisting = assist(denoiser, assistant, runtime.device, placement.dtype)
        attached[name] = _attach_adapter(config, spec, facts, denoiser, experts[name], choices.adapter_path)
        if name in initial:
            attached[name].load(initial[name])
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
            runtime.broadcast_(parameter.data for parameter in attached[name].parameters().values())
        host.add(name, denoiser)
    strengths = dataset_strengths(config)
    whole = config.adapter.is_full_finetune
    dtype = torch.float32 if whole and not config.has_chunked_state else placement.dtype
    regularised = frozenset(one.id for one in config.datasets if one.regularisation and not whole)
    return TrainedModel(
        spec, source, facts, host, attached, dtype, strengths, regularised, tuple(eight_bit_lines), prepared, parking,
        assisting,
    )  # fmt: skip


def dataset_strengths(config: RunConfig) -> dict[str, float]:
    """Adapter strength by enabled dataset, where it is not 1. Any entry keeps the run from using CUDA graphs."""
    return {one.id: one.adapter_strength for one in config.datasets if not one.disabled and one.adapter_strength != 1.0}


def _placement(config: RunConfig, spec: ModelSpec, runtime: Runtime, choices: DenoiserChoices) -> PartPlacement:
    """Device and precision of the base weights.

    With 8-bit layers all other weights are in 16 bits: bf16 beside fp8, the run's precision beside int8.
    """
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


def _attach_adapter(
    config: RunConfig, spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module, expert: Expert,
    adapter_path: AdapterPath = "auto",
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
        keeps_dtype=config.has_chunked_state,
    )


def _initial_adapters(config: RunConfig, facts: ModelFacts) -> dict[ExpertName, AdapterState]:
    """The adapters in `init_from`, by expert. The path is a file; if it is one of a pair, the other is read too.

    A file without an expert's name is used for both experts.
    """
    if config.adapter.init_from is None:
        return {}
    path = Path(config.adapter.init_from).expanduser()
    states = [state for file in _with_other_expert(path) for state in open_adapter(file, facts.family).states()]
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


def _with_other_expert(path: Path) -> Sequence[Path]:
    from gracetune.adapters.metadata import other_expert_file

    other = other_expert_file(path)
    return (path, other) if other is not None and other.is_file() else (path,)
