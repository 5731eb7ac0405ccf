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


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for an image of rows x columns tokens."""
    config, tokens = model.config, rows * columns
    return {
        "hidden_states": torch.empty(batch, tokens, config.in_channels),
        "encoder_hidden_states": torch.empty(batch, text, config.joint_attention_dim),
        "pooled_projections": torch.empty(batch, config.pooled_projection_dim),
        "timestep": torch.ones(batch),
        "img_ids": torch.empty(tokens, 3),
        "txt_ids": torch.empty(text, 3),
        "guidance": torch.ones(batch) if config.guidance_embeds else None,
    }
