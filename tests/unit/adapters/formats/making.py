"""Adapters of every kind with random weights, for layers of the tiny models."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from gracetune.adapters.state import AdapterState, ExpertStage, Layer
from gracetune.adapters.verification import shapes_of
from gracetune.models.registry import KEY_MAPS

ALGORITHMS: tuple[str, ...] = ("lora", "dora", "lokr", "loha", "locon", "ia3", "diag_oft", "full_delta")
FLAVOURS = {
    "wan": "t2v-14b-2.2", "qwen_image": "t2i", "flux": "dev", "flux2": "dev", "z_image": "base",
    "krea2": "raw",
    "sdxl": "base-1.0", "stable_audio": "open-1.0",
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "wan": diffusers.WanTransformer3DModel,
    "qwen_image": diffusers.QwenImageTransformer2DModel,
    "flux": diffusers.FluxTransformer2DModel,
    "flux2": diffusers.Flux2Transformer2DModel,
    "z_image": diffusers.ZImageTransformer2DModel,
    "krea2": diffusers.Krea2Transformer2DModel,
    "sdxl": diffusers.UNet2DConditionModel,
    "stable_audio": diffusers.StableAudioDiTModel,
}
Shapes = dict[str, tuple[int, ...]]


def denoiser(family: str, folder: Path, component: str | None = None) -> nn.Module:
    return CLASSES[family].from_pretrained(folder / (component or KEY_MAPS[family].component)).eval()


def layer_shapes(family: str, tiny_model: Callable[[str, str], Path], flavour: str | None = None) -> Shapes:
    return _shapes(family, tiny_model(family, flavour or FLAVOURS[family]))


@functools.cache
def _shapes(family: str, folder: Path) -> Shapes:
    cls = CLASSES[family]
    with torch.device("meta"):
        return shapes_of(cls.from_config(cls.load_config(folder / KEY_MAPS[family].component)))


def in_blocks(shapes: Shapes) -> Shapes:
    """Attention and feed-forward, the layers everybody trains."""
    return {path: shape for path, shape in shapes.items() if any(part in path for part in _IN_BLOCKS)}


_IN_BLOCKS = (".attn", ".attention.", ".ff", ".feed_forward.", "_mlp")


def one_of_each(shapes: Shapes) -> Shapes:
    """Of layers that differ in their block's number alone, the first: as many names and shapes, a tenth of the work."""
    found: dict[str, str] = {}
    for path in shapes:
        found.setdefault(re.sub(r"(?<=(?:ocks|yers|iner)\.)\d+", "#", path), path)
    return {path: shapes[path] for path in found.values()}


def state(
    family: str,
    shapes: Shapes,
    algorithm: str,
    *,
    rank: int = 2,
    alpha: float = 3.0,
    seed: int = 0,
    expert: ExpertStage = "",
    options: Iterable[str] = (),
) -> AdapterState:
    generator = torch.Generator().manual_seed(seed)
    keys = KEY_MAPS[family]
    layers = {
        path: layer(algorithm, shapes[path], rank, alpha, generator, frozenset(options))
        for path in keys.in_order(shapes)
    }
    return AdapterState(family, expert, layers)


def layer(
    algorithm: str,
    shape: Sequence[int],
    rank: int,
    alpha: float,
    generator: torch.Generator,
    options: frozenset[str] = frozenset(),
) -> Layer:
    """`options`: tucker (convolutions only), decomposed and both (LoKr), dora, rescale, bias, on_input."""

    def values(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * 0.1

    out, inputs, *kernel = shape
    ones = (1,) * len(kernel)
    tucker = "tucker" in options and any(side > 1 for side in kernel)
    columns = inputs * int(torch.tensor([1, *kernel]).prod())
    rows = values(out).abs() + 0.5
    magnitude = {"dora_scale": rows.reshape(out, *(1,) * (len(shape) - 1))} if "dora" in options else {}
    if algorithm in ("lora", "dora"):
        tensors = {"lora_A.weight": values(rank, inputs, *kernel), "lora_B.weight": values(out, rank, *ones)}
        return Layer(algorithm, tensors | ({"dora_scale": rows} if algorithm == "dora" else {}), alpha, rank)
    if algorithm == "locon":
        tensors = {"lora_down.weight": values(rank, inputs, *kernel), "lora_up.weight": values(out, rank, *ones)}
        if tucker:
            tensors |= {"lora_down.weight": values(rank, inputs, *ones), "lora_mid.weight": values(rank, rank, *kernel)}
        return Layer("locon", tensors | magnitude, alpha, rank)
    if algorithm == "loha":
        tensors = {}
        for number in "12":
            if tucker:
                tensors[f"hada_t{number}"] = values(rank, rank, *kernel)
            tensors[f"hada_w{number}_a"] = values(rank, out) if tucker else values(out, rank)
            tensors[f"hada_w{number}_b"] = values(rank, inputs if tucker else columns)
        return Layer("loha", tensors | magnitude, alpha, rank)
    if algorithm == "lokr":
        return _lokr(shape, rank, alpha, values, options, magnitude)
    if algorithm == "ia3":
        on_input = "on_input" in options
        size = (1, inputs if on_input else out, *ones) if kernel else (inputs if on_input else out,)
        return Layer("ia3", {"weight": values(*size), "on_input": torch.tensor(int(on_input))}, 1.0, None)
    if algorithm == "diag_oft":
        size = _factor(out)
        tensors = {"oft_blocks": values(out // size, size, size)}
        if "rescale" in options:
            tensors["rescale"] = values(out, *(1,) * (len(shape) - 1)) + 1
        return Layer("diag_oft", tensors, 1.0, None)
    tensors = {"diff": values(*shape)} | ({"diff_b": values(out)} if "bias" in options else {})
    return Layer("full_delta", tensors, 1.0, None)


def _lokr(
    shape: Sequence[int],
    rank: int,
    alpha: float,
    values: Callable[..., Tensor],
    options: frozenset[str],
    magnitude: dict[str, Tensor],
) -> Layer:
    out, inputs, *kernel = shape
    a, c = _factor(out), _factor(inputs)
    columns = inputs // c * int(torch.tensor([1, *kernel]).prod())
    tensors = {"lokr_w1": values(a, c)}
    if "both" in options:
        tensors = {"lokr_w1_a": values(a, rank), "lokr_w1_b": values(rank, c)}
    if "tucker" in options and any(side > 1 for side in kernel):
        tensors |= {"lokr_t2": values(rank, rank, *kernel)}
        tensors |= {"lokr_w2_a": values(rank, out // a), "lokr_w2_b": values(rank, inputs // c)}
    elif "decomposed" in options or "both" in options:
        tensors |= {"lokr_w2_a": values(out // a, rank), "lokr_w2_b": values(rank, columns)}
    else:
        tensors |= {"lokr_w2": values(out // a, inputs // c, *kernel)}
    whole = "lokr_w2" in tensors and "lokr_w1" in tensors
    return Layer("lokr", tensors | magnitude, 1.0 if whole else alpha, None if whole else rank)


def _factor(number: int) -> int:
    return next((factor for factor in (4, 2, 3) if number % factor == 0), 1)
