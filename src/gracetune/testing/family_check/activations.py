"""Planned activations against what a real forward pass on a CPU keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gracetune.adapters.attach import attach, describe
from gracetune.adapters.targets import select as select_layers
from gracetune.adapters.trainable import select
from gracetune.config.run_config import Adapter
from gracetune.models.footprint import Footprint
from gracetune.models.registry import build_published, example_inputs_of, spec_of
from gracetune.models.spec import ModelSpec
from gracetune.planning.activations import StepMethod, activations
from gracetune.planning.tracing.families import trace_family
from gracetune.planning.tracing.memory import saved_tensors
from gracetune.planning.tracing.trace import trace
from gracetune.testing.family_check.case import FamilyCase, require

LORA = Adapter(kind="lora", rank=4)
BATCH, ROWS, COLUMNS, TEXT = 2, 8, 12, 17
"""Of the real pass: an image of rows x columns tokens, and a caption."""
TOLERANCE = 0.02
EAGER = StepMethod(compiled=False, adapter_path="auto", compute_bytes=4)


def caption_tokens(spec: ModelSpec) -> int:
    """Of the real pass: a number that the denoiser does not pad."""
    return -(-TEXT // spec.token_multiple) * spec.token_multiple


def kept_by_real_blocks(case: FamilyCase, model: nn.Module) -> int:
    """Bytes that autograd saves in the repeated blocks of a real forward pass, each storage once."""
    inside = 0
    blocks = [module for module in model.modules() if type(module).__name__ in case.spec.repeated_blocks]
    shared: list[Tensor] = [*model.parameters(), *model.buffers()]

    def enter(block: nn.Module, given: Any, named: Any) -> None:
        nonlocal inside
        inside += 1
        tensors = [one for one in tree_leaves((given, named)) if isinstance(one, Tensor)]
        is_trained = any(parameter.requires_grad for parameter in block.parameters())
        if is_trained and not any(one.requires_grad for one in tensors):
            tensors[0].requires_grad_(True)  # so that the first trained block gets a gradient like the others
        shared.extend(one for one in tree_leaves((given, named)) if isinstance(one, Tensor) and not one.requires_grad)

    def leave(*_: Any) -> None:
        nonlocal inside
        inside -= 1

    for block in blocks:
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)
    generator = torch.Generator().manual_seed(0)
    given = example_inputs_of(case.family)(
        model, batch=BATCH, rows=ROWS, columns=COLUMNS, text=caption_tokens(case.spec)
    )
    filled = tree_map_only(Tensor, lambda one: torch.rand(one.shape, generator=generator).to(one.dtype), given)
    with saved_tensors([], counts=lambda: inside > 0) as saved:
        output = tree_leaves(model(**filled, return_dict=False)[0])[0]
    require(
        output.requires_grad, "an output without gradients", "one that depends on the blocks", "correct published.py"
    )
    without = {tensor.untyped_storage()._cdata for tensor in shared}
    return sum(size for key, (size, _) in saved.bytes_by_storage.items() if key not in without)


def planned(footprint: Footprint, adapter: Adapter, method: StepMethod) -> int:
    """Bytes that a plan counts for the real pass."""
    image, text = ROWS * COLUMNS, caption_tokens(spec_of(footprint.family))
    tokens: Any = {"image": image, "text": text, "joint": image + text, "vision": 0}
    return BATCH * activations(footprint, tokens, select(footprint, adapter), method)[0].kept


def planned_and_real(case: FamilyCase) -> tuple[int, int]:
    """Bytes of the tiny model's blocks with a LoRA: traced, and kept by a real pass."""
    spec, expert = case.spec, case.facts.experts[0]
    model = spec.build_denoiser(case.source, expert)
    layers = select_layers(describe(model), spec.default_targets, untrained=spec.untrained).paths
    table = trace(
        model, spec.repeated_blocks, layers, example_inputs_of(case.family), multiple=spec.token_multiple,
        device="cpu", compiled=False, dtype=torch.float32,
    )  # fmt: skip
    footprint = replace(case.footprint, parameters=table.parameters, width=table.width, blocks=table.blocks)
    real = case.denoiser(expert)
    attach(real, LORA, family=case.family, default_targets=layers, seed=0)
    return planned(footprint, LORA, EAGER), kept_by_real_blocks(case, real)


def check(case: FamilyCase) -> str:
    """The tiny model's activations; and that the flavour's footprint has the published model's layers."""
    plan, real = planned_and_real(case)
    off = plan / real - 1
    require(
        abs(off) <= TOLERANCE, f"{plan:,} bytes planned, {real:,} kept ({off:+.1%})", f"within {TOLERANCE:.0%}",
        "compare `example_inputs` in published.py with the arguments in `predict`",
    )  # fmt: skip
    check_published(case.spec, case.footprint)
    return f"{plan:,} bytes planned, {real:,} kept ({off:+.1%})"


def check_published(spec: ModelSpec, footprint: Footprint) -> None:
    """The footprint has the published model's parameters, and its default targets."""
    if not footprint.blocks:
        table = trace_family(footprint, compiled=False)
        footprint = replace(footprint, parameters=table.parameters, blocks=table.blocks)
    model = build_published(footprint.family, footprint.flavour)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    require(
        parameters == footprint.parameters, f"{footprint.parameters:,} parameters in the footprint",
        f"{parameters:,}, as in the published model", "correct `parameters` in footprint.py",
    )  # fmt: skip
    paths = select_layers(describe(model), spec.default_targets, untrained=spec.untrained).paths
    named = [model.get_parameter(f"{path}.weight").numel() for path in paths]
    layers = sum(block.count for block in footprint.blocks for linear in block.linears if linear.default)
    require(
        (layers, footprint.linear_weights) == (len(named), sum(named)),
        f"{layers} default targets with {footprint.linear_weights:,} weights in the footprint",
        f"{len(named)} with {sum(named):,}, as in the published model",
        "correct footprint.py, or default_targets in SPEC",
    )  # fmt: skip
