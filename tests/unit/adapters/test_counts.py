"""The estimate counts the same parameters as the model that is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, WanTransformer3DModel
from torch import nn

from gracetune.adapters.attach import attach, describe
from gracetune.adapters.trainable import TargetLayers, select, trainable
from gracetune.config.run_config import Adapter
from gracetune.models.footprint import FootprintBlock, FootprintLinear
from gracetune.models.registry import FOOTPRINTS, spec_of
from unit.adapters.denoisers import ADAPTERS, Denoiser, TinyModel, load

VARIANTS: list[dict[str, Any]] = [
    {"rank": 2},
    {"rank": 7},
    {"rank": 64},
    {"rank": 1, "factor": 4, "decompose_both": True},
    {"rank": 2, "factor": 8},
    {"rank": 2, "full_rank": True, "factor": 4},
]


def planned(denoiser: Denoiser, kind: str, options: dict[str, Any]) -> dict[str, list[tuple[int, ...]]]:
    """The planner's count for each linear layer and convolution."""
    adapter = Adapter(kind=kind, **options)  # type: ignore[arg-type]
    found = {}
    for path, info in describe(denoiser.model).items():
        if info.kind in ("linear", "conv"):
            weight, bias = denoiser.model.get_submodule(path).weight, denoiser.model.get_submodule(path).bias
            outputs, inputs, *kernel = weight.shape
            linear = FootprintLinear(path, inputs, outputs, "x", bias=bias is not None, kernel=tuple(kernel))
            footprint = replace(FOOTPRINTS[denoiser.family][0], blocks=(FootprintBlock("", 1, (), (), (), (linear,)),))
            (target,) = select(footprint, adapter).targets
            found[path] = sorted(tensor.shape for tensor in target.tensors())
    return found


EVERYDAY = ("dora", "lokr")
CASES = [
    *(("wan", kind, options) for kind in ADAPTERS for options in (VARIANTS if kind == "lokr" else VARIANTS[1:3])),
    *(
        pytest.param("sdxl", kind, {"rank": 2, "conv_rank": 3}, marks=[] if kind in EVERYDAY else [pytest.mark.full])
        for kind in ADAPTERS
    ),
    pytest.param("sdxl", "lokr", {"rank": 2, "conv_rank": 3, "full_rank": True}, marks=pytest.mark.full),
]
"""Factors are LoKr's alone."""
PUBLISHED_SDXL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@pytest.mark.parametrize(("family", "kind", "options"), CASES, ids=str)
def test_of_every_layer(tiny_model: TinyModel, family: str, kind: str, options: dict[str, Any]) -> None:
    denoiser = load(tiny_model, family)
    attached = denoiser.attach(kind, **options)
    layers = attached.state().layers
    attached.detach()
    expected = {path: shapes for path, shapes in planned(denoiser, kind, options).items() if path in layers}
    assert expected.keys() == layers.keys()
    assert len(expected) >= 20
    for path, shapes in expected.items():
        tensors = layers[path].tensors.items()
        assert sorted(tuple(tensor.shape) for name, tensor in tensors if name != "on_input") == shapes, path


@pytest.mark.parametrize("family", ["wan", "sdxl"])
def test_of_a_full_finetune(tiny_model: TinyModel, family: str) -> None:
    denoiser = load(tiny_model, family)
    attached = denoiser.attach("full_finetune", targets=())
    expected = sum(parameter.numel() for parameter in denoiser.model.parameters())
    assert sum(parameter.numel() for parameter in attached.parameters().values()) == expected


@pytest.mark.parametrize("factor", [-1, 0, 1, 3, 8, 100])
def test_every_factor_of_lokr(factor: int) -> None:
    adapter = Adapter(kind="lokr", rank=1, factor=factor, targets=("Linear",))
    linear = FootprintLinear("0", 24, 60, "x")
    block = FootprintBlock("", 1, (), (), (), (linear,))
    attached = attach(nn.Sequential(nn.Linear(24, 60)), adapter, family="wan", default_targets=(), seed=0)
    expected = sorted(tensor.shape for tensor in TargetLayers(block, linear, adapter, 1).tensors())
    assert sorted(tuple(parameter.shape) for parameter in attached.parameters().values()) == expected
    assert all(torch.isfinite(parameter).all() for parameter in attached.parameters().values())


@pytest.mark.parametrize(
    ("adapter", "layers"),
    [
        (Adapter(rank=16), 400),
        (Adapter(kind="lokr", rank=10_000, factor=16, targets=("Attention", "FeedForward"),
                 by_module={"Attention": {"factor": 16}, "FeedForward": {"factor": 8}}), 400),
        (Adapter(kind="lokr", full_rank=True, factor=16, exclude=("*attn2*",)), 240),
        pytest.param(Adapter(kind="loha", rank=8, targets=("to_q", "to_k", "to_v", "to_out.0")), 320,
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_of_the_published_14b(adapter: Adapter, layers: int) -> None:
    """The adapters of SimpleTuner and ai-toolkit configs (examples/), by shapes alone."""
    footprint = FOOTPRINTS["wan"][0]
    tensors = trainable(footprint, select(footprint, adapter), adapter)
    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=40, num_attention_heads=40, ffn_dim=13_824)
    attached = attach(model, adapter, family="wan", default_targets=("blocks.*",), seed=0)
    assert attached.selection is not None
    assert len(attached.selection.paths) == layers
    assert sum(parameter.numel() for parameter in attached.parameters().values()) == sum(
        tensor.elements for tensor in tensors
    )


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(Adapter(rank=16), marks=pytest.mark.full),
        Adapter(rank=16, conv_rank=8),
        Adapter(kind="lokr", rank=10_000, conv_rank=8, factor=8),
        pytest.param(
            Adapter(rank=4, conv_rank=2, targets=("ResnetBlock2D", "to_q"), exclude=("conv_shortcut",)),
            marks=pytest.mark.full,
        ),
    ],
    ids=["linear layers", "lora", "lokr", "targets"],
)
def test_of_the_published_sdxl(adapter: Adapter) -> None:
    footprint, spec = FOOTPRINTS["sdxl"][0], spec_of("sdxl")
    tensors = trainable(footprint, select(footprint, adapter), adapter)
    with torch.device("meta"):
        model = UNet2DConditionModel(**PUBLISHED_SDXL)
    attached = attach(
        model, adapter, family="sdxl", default_targets=spec.default_targets, conv_targets=spec.conv_targets, seed=0
    )  # fmt: skip
    assert sum(parameter.numel() for parameter in attached.parameters().values()) == sum(
        tensor.elements for tensor in tensors
    )
