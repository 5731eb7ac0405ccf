"""The records of the formats describe correctly what the programs load.

diffusers, peft and LyCORIS load our files themselves, and predict what our own forward pass predicts. ComfyUI, musubi-
tuner and sd-scripts are not in the package index; what they do was recorded with a checkout (docs/adapters.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris import create_lycoris_from_weights
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from torch import Tensor, nn

from gracetune.adapters.adapter_files import save
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.programs import misread_by
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.merge import merge_module
from gracetune.adapters.state import AdapterState
from gracetune.models.registry import KEY_MAPS
from unit.adapters.formats import making
from unit.adapters.formats.predicting import predict
from unit.adapters.formats.test_diffusers_loads import denoiser_of, pipeline_of

OPTIONS: dict[str, list[tuple[str, ...]]] = {
    "lokr": [(), ("decomposed",), ("both",), ("dora",), ("tucker",)],
    "loha": [(), ("tucker",), ("dora",)],
    "locon": [(), ("tucker",), ("dora",)],
    "diag_oft": [(), ("rescale",)],
    "full_delta": [(), ("bias",)],
    "ia3": [(), ("on_input",)],
}
KINDS = [(algorithm, options) for algorithm in making.ALGORITHMS for options in OPTIONS.get(algorithm, [()])]
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}
WAN_LORA = ("wan", "lora", ())


def held(family: str, model: nn.Module, algorithm: str, options: tuple[str, ...], fits: Callable[..., bool]) -> Any:
    """An adapter on every layer of a model that `fits` accepts, and the paths of the other layers."""
    shapes = {
        path: tuple(module.weight.shape)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    if "decomposed" in options or "both" in options:  # the kernel, and so the split, is not to be seen in the factors
        shapes = {path: shape for path, shape in shapes.items() if len(shape) == 2}
    rank = 1 if "both" in options else 2  # tiny factors are taken apart at the lowest rank only
    state = making.state(family, shapes, algorithm, rank=rank, options=options)
    with_bias = {path for path in shapes if getattr(model.get_submodule(path), "bias", None) is not None}
    layers = {
        path: layer if path in with_bias else replace(layer, tensors={**layer.tensors, "diff_b": None})
        for path, layer in state.layers.items()
    }
    layers = {
        path: replace(layer, tensors={name: tensor for name, tensor in layer.tensors.items() if tensor is not None})
        for path, layer in layers.items()
    }
    one = {path: AdapterState(family, "", {path: layer}) for path, layer in layers.items()}
    kept = {path: layers[path] for path, alone in one.items() if fits(alone)}
    return AdapterState(family, "", kept), [one[path] for path in one if path not in kept]


def ours(family: str, model: nn.Module, state: AdapterState) -> Tensor:
    adapted = copy.deepcopy(model)
    merge_module(state, adapted)
    return predict(family, adapted)


def by_lycoris(model: nn.Module, state: AdapterState) -> nn.Module:
    adapted = copy.deepcopy(model)
    tensors, _ = FORMATS["lycoris"].write(state, torch.float32)
    network, _ = create_lycoris_from_weights(1.0, "", adapted, weights_sd={k: v.clone() for k, v in tensors.items()})
    assert len(network.loras) == len(state.layers)
    network.apply_to()
    return adapted


READ_FOR_THEIR_DTYPE = {"time_embedder", "t_embedder"}
"""LyCORIS removes the weights of layers with a full difference, but Wan and Z-Image read these for their dtype."""


def is_writable(state: AdapterState, format: str) -> bool:
    try:
        FORMATS[format].write(state, torch.float32)
    except CannotHoldError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "algorithm", "options"),
    [
        pytest.param(family, *kind, marks=() if (family, *kind) == ("wan", "lokr", ("dora",)) else pytest.mark.full)
        for family in making.FLAVOURS
        for kind in KINDS
    ],
)
def test_lycoris_loads_what_the_table_calls_right(family, algorithm, options, tiny_model) -> None:
    """LyCORIS also fails where the table expects it."""
    model = making.denoiser(family, tiny_model(family, making.FLAVOURS[family]))
    state, rejected = held(
        family, model, algorithm, options, lambda alone: misread_by(alone, "lycoris", "lycoris") is None
    )
    if algorithm == "full_delta":
        kept = {path: layer for path, layer in state.layers.items() if not READ_FOR_THEIR_DTYPE & {*path.split(".")}}
        state = replace(state, layers=kept)
    for alone in rejected:
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            by_lycoris(model, alone)
    assert bool(state.layers) != (algorithm == "ia3")
    if not state.layers:
        return
    expected = ours(family, model, state)
    torch.testing.assert_close(predict(family, by_lycoris(model, state)), expected, **TOLERANCE)
    assert (predict(family, model) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("format", ["diffusers", "comfyui", "kohya"])
@pytest.mark.parametrize(
    ("family", "algorithm", "options"),
    [
        pytest.param(family, *kind, marks=() if (family, *kind) == WAN_LORA else pytest.mark.full)
        for family in making.FLAVOURS
        for kind in KINDS
        if kind[0] in ("lora", "dora", "locon")
    ],
)
def test_diffusers_loads_what_the_table_calls_right(family, algorithm, options, format, tiny_model, tmp_path) -> None:
    pipeline = pipeline_of(family, tiny_model)
    model = denoiser_of(pipeline, family)
    state, _ = held(
        family,
        model,
        algorithm,
        options,
        lambda alone: misread_by(alone, format, "diffusers") is None and is_writable(alone, format),
    )
    if not state.layers:
        assert format != "diffusers" or "dora" in options or "tucker" in options
        return
    assert misread_by(state, format, "diffusers") is None
    expected, file = ours(family, model, state), save(tmp_path / "adapter.safetensors", state, format, torch.float32)
    if family == "stable_audio":  # diffusers has no loader for it: PEFT's functions are documented
        by_peft(model, file, state)
    else:
        pipeline.load_lora_weights(file)
    torch.testing.assert_close(predict(family, model), expected, **TOLERANCE)


def by_peft(model: nn.Module, file: Path, state: AdapterState) -> None:
    from safetensors.torch import load_file

    layer = next(iter(state.layers.values()))
    dora = any("dora_scale" in one.tensors for one in state.layers.values())
    paths = [f"^{path}$" for path in state.layers]
    config = LoraConfig(r=layer.rank, lora_alpha=int(layer.alpha), target_modules="|".join(paths), use_dora=dora)
    inject_adapter_in_model(config, model)
    found = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    assert not set_peft_model_state_dict(model, found).unexpected_keys


@pytest.mark.full
def test_lycoris_own_kohya_module_loads_our_kohya_files(tiny_model) -> None:
    """`lycoris.kohya`, as sd-scripts calls it for SDXL: layers are found by the original model's names."""
    from lycoris.kohya import create_network_from_weights

    model = making.denoiser("sdxl", tiny_model("sdxl", "base-1.0"))
    keys = KEY_MAPS["sdxl"]
    for algorithm, options in KINDS:
        state, _ = held(
            "sdxl",
            model,
            algorithm,
            options,
            lambda alone: misread_by(alone, "kohya", "lycoris") is None and is_writable(alone, "kohya"),
        )
        if algorithm == "ia3":
            assert not state.layers
            continue
        tensors, _ = FORMATS["kohya"].write(state, torch.float32)
        root = nn.Module()
        for path in state.layers:
            original = keys.original(path)
            assert original is not None
            root.add_module(original.name.replace(".", "_"), copy.deepcopy(model.get_submodule(path)))
        network, _ = create_network_from_weights(1.0, "", None, None, root, weights_sd=tensors)
        assert len(network.unet_loras) == len(state.layers)
        for found in network.unet_loras:
            path = next(
                one
                for one in state.layers
                if found.lora_name == f"lora_unet_{keys.original(one).name.replace('.', '_')}"
            )
            inner = model.get_submodule(path)
            alone = copy.deepcopy(nn.ModuleDict({"layer": inner}))
            merge_module(AdapterState("sdxl", "", {"layer": state.layers[path]}), alone)
            weight = inner.weight
            inputs = torch.randn(
                1, weight.shape[1], *((5,) * (weight.ndim - 2)), generator=torch.Generator().manual_seed(0)
            )
            found.apply_to()
            torch.testing.assert_close(found.org_module[0](inputs), alone["layer"](inputs), atol=1e-4, rtol=1e-4)
