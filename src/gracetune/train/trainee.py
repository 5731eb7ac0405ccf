"""The model that is trained: its denoisers loaded, made trainable, and given their places.

trainee = load_trainee(config, source, runtime, choices)
trainee.parameters()                     # by names that are the same in every run, expert first
trainee.host.activate("high_noise")      # the denoiser whose turn it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.opening import open_adapter
from gracetune.adapters.state import AdapterState, Stage
from gracetune.cache.batches import Batch
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError, Problem
from gracetune.models.experts import ExpertHost, trained_experts
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ExpertName, ModelFacts, ModelSpec, Placement
from gracetune.optim.build import ParamGroup, parameter_names
from gracetune.train.runtime import Runtime

_BASES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Choices:
    """How the denoisers are run: decided before any is loaded, each with its reason elsewhere."""

    checkpointing: bool = False
    memory_budget: float | None = None
    """Of activations kept by compiled blocks; None leaves it to torch."""
    compiled: bool = False
    attention: str | None = None


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
    placement = Placement(runtime.device, _BASES[config.model.base_precision], choices.attention)
    starts = _starts(config, facts)
    experts = {expert.name: expert for expert in facts.experts}
    attached: dict[ExpertName, Attached] = {}
    for name in trained_experts(config.model.experts, facts):
        denoiser = spec.load_denoiser(source, experts[name], placement)
        attached[name] = _made_trainable(config, spec, facts, denoiser, experts[name])
        if name in starts:
            attached[name].load(starts[name])
        denoiser.train()
        _prepare(denoiser, spec, choices)
        if runtime.is_sharded:
            runtime.shard(denoiser, spec.repeated_blocks)
        else:
            runtime.same_everywhere_(parameter.data for parameter in attached[name].parameters().values())
        host.add(name, denoiser)
    strengths = {one.id: one.adapter_strength for one in config.datasets if one.adapter_strength != 1.0}
    whole = config.adapter.kind == "full_finetune"
    dtype = torch.float32 if whole else {"fp8": torch.bfloat16}.get(config.model.base_precision) or placement.dtype
    return Trainee(spec, source, facts, host, attached, dtype, strengths)


def _made_trainable(
    config: RunConfig, spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module, expert: Expert
) -> Attached:
    return attach(
        denoiser,
        config.adapter,
        family=spec.family,
        stage=cast(Stage, expert.name),
        default_targets=spec.default_targets,
        untrained=(*spec.untrained, *facts.untrained),
        seed=config.training.seed,
    )


def _prepare(denoiser: Any, spec: ModelSpec, choices: Choices) -> None:
    if choices.checkpointing:
        denoiser.enable_gradient_checkpointing()
    if not choices.compiled:
        return
    if choices.memory_budget is not None:
        torch._functorch.config.activation_memory_budget = choices.memory_budget
    for module in denoiser.modules():
        if type(module).__name__ in spec.repeated_blocks:
            module.compile()


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
