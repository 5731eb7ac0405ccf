"""The denoiser of published FLUX.1 weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import nn

_DIFFERS: Mapping[str, Mapping[str, Any]] = {
    "dev": {"guidance_embeds": True},
    "krea": {"guidance_embeds": True},
    "kontext": {"guidance_embeds": True},
}
"""Flavour -> values of the published config file that differ from diffusers' defaults."""


def build_published(flavour: str) -> nn.Module:
    build: Any = FluxTransformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(**_DIFFERS.get(flavour, {}))
    return model
