"""The memory plan of a run, and the choices that follow from it: checkpointing, compilation, base precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gracetune.adapters.assistant import AssistantFile
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine
from gracetune.models.attention import attention_facts, choose_attention
from gracetune.models.registry import footprint_of
from gracetune.models.source import ModelSource, elements_of
from gracetune.models.spec import AttentionCalls, Fp8Layouts, ModelFacts, ModelSpec
from gracetune.planning.dataset_facts import survey
from gracetune.planning.demand import Demand
from gracetune.planning.estimate import estimate
from gracetune.planning.memory_tiers import free_on_disk
from gracetune.planning.plan import BASE, CONFIG_VALUE, INPUTS, Plan, plan
from gracetune.planning.processes import ONE_PROCESS, Processes
from gracetune.planning.tracing.store import with_blocks
from gracetune.train.blocks import Shapes
from gracetune.train.runtime import Runtime
from gracetune.train.trained_model import BasePrecision, DenoiserChoices
from gracetune.units import format_bytes

_MOST_OF_MEMORY = 0.5
"""Without a plan, base weights stay in 16 bits if they take at most this fraction of the memory. The step needs the
rest."""


@dataclass(frozen=True)
class PlannedRun:
    """A memory plan, and whether it applies to this run's weights."""

    demand: Demand
    plan: Plan
    mismatch: str | None = None
    """Why the plan does not apply: the weights differ in size from the flavour's. None if it applies."""
    parameters: int = 0
    """Number of parameters of all the model's denoisers, trained or not."""

    @property
    def parks_experts(self) -> bool:
        if self.mismatch is not None:
            return False
        return any(change.key == "placement: idle expert" for change in self.plan.changes)

    @property
    def parks_inputs(self) -> bool:
        return self.mismatch is None and any(change.key == INPUTS for change in self.plan.changes)

    @property
    def fp8_layouts(self) -> Fp8Layouts:
        """Both layouts, unless the plan saves memory by keeping one."""
        one = any(change.key == "placement: fp8 layouts" for change in self.plan.changes)
        return "one" if one and self.mismatch is None else "both"

    @property
    def managed_bytes(self) -> int:
        """Managed memory that this process will hold besides its overflow arena: caches and, if the plan applies,
        parked experts."""
        if self.mismatch is None:
            return self.plan.managed_bytes
        return sum(
            line.bytes for line in self.plan.lines if line.managed and line.role in ("latent cache", "text cache")
        )

    @property
    def step_bytes(self) -> int:
        """Device memory that a step needs besides its denoiser's weights, so experts are not prefetched into it.

        0 if the plan does not apply.
        """
        if self.mismatch is not None:
            return 0
        policy = next(name for name, value in CONFIG_VALUE.items() if value == self.plan.checkpointing.value)
        weights = self.demand.denoisers[0].size(self.demand.settings.precision)
        return max(0, self.demand.training_peak(policy) - weights)


def make_plan(
    config: RunConfig, machine: Machine, spec: ModelSpec, source: ModelSource, facts: ModelFacts,
    assistant: AssistantFile | None = None, *, processes: Processes = ONE_PROCESS, force_oversubscription: bool = False,
    cache: Path | None = None,
) -> PlannedRun:  # fmt: skip
    """The plan of a run for a machine. `cache` is gracetune's cache folder, where a traced footprint is kept."""
    footprint, _ = footprint_of(config.model.model_copy(update={"flavour": facts.flavour}))
    footprint = with_blocks(footprint, cache)
    compiled = compiles(config, "cpu" if machine.profile.value == "cpu" else "cuda")
    elements = None if assistant is None else elements_of(assistant.path)
    demand = estimate(
        config, footprint, survey(config), compiled=compiled, processes=processes, assistant_elements=elements
    )
    parameters = sum(one.numel() for one in spec.build_denoiser(source, facts.experts[0]).parameters())
    found = plan(
        demand, machine, disk_free=free_on_disk(config.output_dir), force_oversubscription=force_oversubscription
    )
    return PlannedRun(demand, found, footprint.mismatch(parameters), parameters * len(facts.experts))


def processes_of(runtime: Runtime) -> Processes:
    return Processes(runtime.world_size, runtime.local_world_size, runtime.is_sharded, runtime.launch.reshard)


def reject_misfit(planned: PlannedRun, *, allowed: bool) -> None:
    """Reject a config that does not fit, before anything is loaded. Plans that do not apply reject nothing."""
    plan = planned.plan
    if planned.mismatch is not None or allowed or plan.verdict not in ("does not fit", "fits with these changes"):
        return
    edits = [change for change in plan.changes if not change.automatic]
    begin = "it fits with" if plan.verdict != "does not fit" else "what saves most, though not enough:"
    typed = " ".join(f"--set {_quoted(f'{change.key}={change.after}')}" for change in edits)
    hint = f"{begin} {typed}" if typed else "a smaller resolution, fewer frames, or a larger machine"
    problems = [
        Problem(
            key="the memory plan",
            found=f"does not fit as the config stands; {plan.verdict}: {plan.summary}",
            expected="a run that fits this machine",
            hint=f"{hint}; or try it all the same with --allow-misfit",
        )
    ]
    problems += [
        Problem(one.key, one.before, one.after, f"saves {format_bytes(one.saves)}: {one.why}") for one in edits
    ]
    raise ConfigError(problems)


def _quoted(setting: str) -> str:
    return f"'{setting}'" if "[" in setting else setting


def compiles(config: RunConfig, device: str) -> bool:
    """Whether blocks are compiled. `auto` compiles on a GPU only, where it saves more time than it takes."""
    return config.training.compile == "on" or (config.training.compile == "auto" and device == "cuda")


def choose(
    config: RunConfig, planned: PlannedRun, calls: AttentionCalls, device: torch.device, dtype: torch.dtype,
    *, shapes: int | None = None,
) -> tuple[DenoiserChoices, tuple[str, ...]]:  # fmt: skip
    """Choose how the denoisers are executed; return the choices and a line with the reason of each.

    `shapes` is the number of different sample shapes; None if it is not known yet.
    """
    attention = choose_attention(config.training.attention, attention_facts(device, dtype, calls))
    compiled = compiles(config, device.type)
    requested = config.training.gradient_checkpointing
    budget: float | None = None
    if requested != "auto":
        recompute, why = requested == "full", "as the config says"
    elif planned.mismatch is not None:
        recompute = device.type == "cuda"
        why = "auto, without a plan for these weights: " + ("the safe choice" if recompute else "no GPU to run out of")
    else:
        chosen = planned.plan.checkpointing
        recompute, why = chosen.value == "full", f"auto: {chosen.why}"
        budget = chosen.activation_memory_budget if compiled else None
        recompute = recompute or (chosen.value == "auto" and budget is None)
    parks = recompute and device.type == "cuda" and planned.parks_inputs
    if parks:
        why += "; the blocks' inputs wait in host memory until their backward pass: they do not fit beside the rest"
    base, why_base = choose_base(config, planned)
    lines = (
        f"attention: {attention.reason}",
        f"gradient checkpointing {_checkpointing_text(recompute, budget)}: {why}",
        f"torch.compile {_compile_text(config, shapes, calls) if compiled else 'off'}",
        *(() if why_base is None else (f"base weights {base}: {why_base}",)),
    )
    return DenoiserChoices(
        recompute, budget, compiled, attention.backend, base_precision=base, fp8_layouts=planned.fp8_layouts,
        park_inputs=parks, shapes=_shapes(config, shapes, calls),
    ), lines  # fmt: skip


def choose_base(config: RunConfig, planned: PlannedRun) -> tuple[BasePrecision, str | None]:
    """The precision of the base weights, and the reason if the config leaves the choice to the plan (`auto`)."""
    requested = config.model.base_precision
    if requested != "auto":
        return requested, None
    plain: BasePrecision = "fp16" if config.training.mixed_precision == "fp16" else "bf16"
    summary = f"model.base_precision auto; {planned.plan.summary}"
    if not planned.demand.settings.can_store_8_bits:
        return plain, f"sharded weights (FSDP) cannot be held in 8 bits; {summary}"
    if planned.mismatch is not None:
        return _base_without_plan(plain, planned)
    if planned.plan.verdict == "unknown":
        return "int8", f"model.base_precision auto, and how much memory there is is not known: {planned.plan.summary}"
    if any(change.key == BASE for change in planned.plan.changes):
        return "int8", f"{plain} does not fit, as the plan shows; {summary}"
    return plain, f"they fit; {summary}"


def _base_without_plan(plain: BasePrecision, planned: PlannedRun) -> tuple[BasePrecision, str]:
    """Choose by comparing the size of the weights with the memory, because the plan does not apply to them."""
    size, budget = 2 * planned.parameters, planned.plan.tiers[0].tier.budget
    limit = "an unknown amount" if budget is None else format_bytes(budget)
    found = (
        f"model.base_precision auto, without a plan for these weights: {format_bytes(size)} in {plain}, {limit} usable"
    )
    return (plain if budget is not None and size <= _MOST_OF_MEMORY * budget else "int8"), found


def _checkpointing_text(recompute: bool, budget: float | None) -> str:
    if recompute:
        return "on"
    return "off" if budget is None or budget == 1 else f"in part (torch.compile's activation budget {budget:g})"


def _shapes(config: RunConfig, shapes: int | None, calls: AttentionCalls) -> Shapes:
    """For which shapes blocks are compiled. `shapes` is the number of sample shapes.

    With token routing, blocks in a route see fewer tokens than the others, so several exact shapes occur. If masked
    tokens are always kept, or attention is masked (captions differ in length), the number of tokens varies from batch
    to batch, and exact shapes would need a graph for each number.
    """
    if shapes != 1 or config.keeps_masked_tokens:
        return "several"
    if not config.skips_blocks:
        return "one"
    return "several" if calls.masked else "few"


def _compile_text(config: RunConfig, shapes: int | None, calls: AttentionCalls) -> str:
    if shapes == 1:
        routed = {
            "one": "",
            "few": ", and for the tokens that each route keeps",
            "several": ", and any number of kept tokens",
        }
        return f"on: repeated blocks, for the one shape all samples have{routed[_shapes(config, shapes, calls)]}"
    why = "their shapes are not known yet" if shapes is None else f"samples have {shapes} different shapes"
    return f"on: repeated blocks, once for any shape ({why})"


def shapes_of(index: DataIndex) -> int:
    """The number of different shapes of a run's samples, references included."""
    return len({item.shape for dataset in index.datasets for item in dataset.items})
