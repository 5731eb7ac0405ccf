"""Memory of our adapter layers in a real step, on the meta device and compiled, compared with the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gracetune.adapters.attach import attach
from gracetune.adapters.trainable import select
from gracetune.config.run_config import Adapter
from gracetune.models.footprint import Footprint
from gracetune.models.registry import FOOTPRINTS
from gracetune.planning.activations import StepMethod, activations, casts_tensors
from unit.models import published
from unit.models.compiled_memory import kept_by_compiler
from unit.models.meta_memory import BF16, on_meta, train_step
from unit.models.test_compiled_footprints import BATCH, WAN, block_of

FOOTPRINT = FOOTPRINTS["wan"][0]
LINEARS = tuple(linear.name for block in FOOTPRINT.blocks for linear in block.linears if linear.default)
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 16},
    "dora": {"kind": "dora", "rank": 16},
    "lokr": {"kind": "lokr", "factor": 16, "full_rank": True},
    "lokr by rank": {"kind": "lokr", "factor": 16, "rank": 16},
    "loha": {"kind": "loha", "rank": 16},
    "loha rebuilt": {"kind": "loha", "rank": 64},
}
EVERYDAY = ("lokr",)


def measured(adapter: Adapter, count: int, *, checkpointing: bool) -> int:
    """Peak of one step with `count` blocks, not counting parameters, gradients and inputs."""
    with on_meta():
        model = published.denoiser("wan", FOOTPRINT.flavour, num_layers=count)
        inputs = published.inputs("wan", FOOTPRINT.flavour, batch=BATCH, side=64, text=512)
        attach(model, adapter, family="wan", default_targets=LINEARS, seed=0)
    return train_step(model, inputs, checkpointing=checkpointing).peak


def predicted(adapter: Adapter, count: int, *, checkpointing: bool) -> int:
    footprint: Footprint = replace(FOOTPRINT, blocks=tuple(replace(block, count=count) for block in FOOTPRINT.blocks))
    method, selection = StepMethod(compiled=False, adapter_path="auto"), select(footprint, adapter)
    tokens = {"image": 4096, "text": 512, "joint": 4608, "vision": footprint.vision_tokens}
    policy = "full" if checkpointing else "off"
    entry = next(one for one in activations(footprint, tokens, selection, method) if one.policy == policy)
    cast = [target for target in selection.targets if casts_tensors(target, method)]
    copies = 2 * sum(tensor.elements for target in cast for tensor in target.tensors())
    return entry.total(BATCH) + (0 if checkpointing else copies)


@pytest.mark.usefixtures("gpu_kernels")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.full]) for name in ADAPTERS]
)
class TestEager:
    def test_each_further_block(self, name: str) -> None:
        adapter = Adapter(**ADAPTERS[name])
        grown = measured(adapter, 3, checkpointing=False) - measured(adapter, 2, checkpointing=False)
        expected = predicted(adapter, 3, checkpointing=False) - predicted(adapter, 2, checkpointing=False)
        assert expected == pytest.approx(grown, rel=0.01)

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_the_peak_is_covered(self, name: str, checkpointing: bool) -> None:
        """With two blocks, what a single layer needs dominates. The plan may be above the measurement, not below."""
        adapter = Adapter(**ADAPTERS[name])
        peak = measured(adapter, 2, checkpointing=checkpointing)
        assert peak <= predicted(adapter, 2, checkpointing=checkpointing) <= 1.2 * peak


@pytest.mark.full
@pytest.mark.usefixtures("opaque_attention")
@pytest.mark.parametrize("name", ["lora", "lokr", "lokr by rank"])
def test_what_the_compiler_saves(name: str) -> None:
    """No product of the forward pass that is as large as an activation."""
    adapter = Adapter(**ADAPTERS[name])

    def build() -> nn.Module:
        torch.set_default_dtype(BF16)
        try:
            block = WAN.build()
        finally:
            torch.set_default_dtype(torch.float32)
        holder = nn.ModuleDict({"block": block.requires_grad_(False)})
        attach(holder, adapter, family="wan", default_targets=LINEARS, seed=0)
        return block

    kept = kept_by_compiler(build, lambda _block: WAN.call(), batch=BATCH)
    block = replace(block_of(WAN), count=1)
    footprint = replace(FOOTPRINT, blocks=(block,))
    tokens = {"image": WAN.tokens, "text": WAN.text, "joint": WAN.tokens + WAN.text, "vision": 0}
    method = StepMethod(compiled=True, adapter_path="auto")
    expected = BATCH * activations(footprint, tokens, select(footprint, adapter), method)[0].kept
    assert expected == pytest.approx(kept, rel=0.01)
