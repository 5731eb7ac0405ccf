"""Tiny denoisers with one batch each: a transformer without and a U-Net with convolutions to adapt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel, WanTransformer3DModel
from torch import Tensor, nn

from gracetune.adapters.attach import Attached, attach
from gracetune.config.run_config import Adapter

ADAPTERS = ("lora", "dora", "locon", "loha", "lokr", "ia3", "diag_oft", "full_delta")
TARGETS = {"wan": ("Attention", "FeedForward"), "sdxl": ("mid_block", "Downsample2D", "conv_shortcut")}
"""The targets. Those of the U-Net include every kind of layer: linear, convolutions of one and nine pixels, strides."""
TinyModel = Callable[[str, str], Path]
_LOADED: dict[tuple[Path, torch.dtype], nn.Module] = {}


@dataclass(frozen=True)
class Denoiser:
    family: str
    model: Any

    def __call__(self) -> Tensor:
        dtype = self.model.dtype
        return (_wan if self.family == "wan" else _sdxl)(self.model, dtype)

    def attach(self, kind: str = "lora", *, seed: int = 0, **options: Any) -> Attached:
        adapter = Adapter(kind=kind, **{"rank": 2, "targets": TARGETS[self.family], **options})  # type: ignore[arg-type]
        return attach(self.model, adapter, family=self.family, default_targets=TARGETS[self.family], seed=seed)


def load(tiny_model: TinyModel, family: str, dtype: torch.dtype = torch.float32) -> Denoiser:
    kind, flavour, part = {
        "wan": (WanTransformer3DModel, "t2v-14b-2.2", "transformer"),
        "sdxl": (UNet2DConditionModel, "base-1.0", "unet"),
    }[family]
    folder = tiny_model(family, flavour) / part
    if (folder, dtype) not in _LOADED:
        _LOADED[folder, dtype] = kind.from_pretrained(folder, torch_dtype=dtype).eval().requires_grad_(False)
    # A copy also has its weights at addresses that suit the CPU, whatever the file's were: sums come out the same.
    return Denoiser(family, copy.deepcopy(_LOADED[folder, dtype]))


def _random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _wan(model: Any, dtype: torch.dtype) -> Tensor:
    result: Tensor = model(
        hidden_states=_random_tensor(1, 16, 3, 4, 4).to(dtype),
        timestep=torch.tensor([500]),
        encoder_hidden_states=_random_tensor(1, 5, model.config.text_dim, seed=1).to(dtype),
        return_dict=False,
    )[0]
    return result


def _sdxl(model: Any, dtype: torch.dtype) -> Tensor:
    width = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim
    result: Tensor = model(
        _random_tensor(1, 4, 8, 8).to(dtype),
        torch.tensor([500]),
        encoder_hidden_states=_random_tensor(1, 5, model.config.cross_attention_dim, seed=1).to(dtype),
        added_cond_kwargs={
            "text_embeds": _random_tensor(1, width, seed=2).to(dtype),
            "time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]], dtype=dtype),
        },
        return_dict=False,
    )[0]
    return result


def shake(attached: Attached, std: float = 0.05, seed: int = 7) -> None:
    """Random values for all parameters, as after some training: nothing is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attached.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
