"""The denoiser of published FLUX.2 weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import nn

_KLEIN_9B = {
    "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288,
    "guidance_embeds": False,
}  # fmt: skip
_KLEIN_4B = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
_DIFFERS: Mapping[str, Mapping[str, Any]] = {
    "klein-base-9b": _KLEIN_9B,
    "klein-base-4b": _KLEIN_4B,
    "klein-9b": _KLEIN_9B,
    "klein-4b": _KLEIN_4B,
}
"""Flavour -> values of the published config file that differ from diffusers' defaults."""


def build_published(flavour: str) -> nn.Module:
    build: Any = Flux2Transformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(**_DIFFERS.get(flavour, {}))
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for an image of rows x columns tokens."""
    config, tokens = model.config, rows * columns
    axes = len(config.axes_dims_rope)
    return {
        "hidden_states": torch.empty(batch, tokens, config.in_channels),
        "encoder_hidden_states": torch.empty(batch, text, config.joint_attention_dim),
        "timestep": torch.ones(batch),
        "img_ids": torch.empty(tokens, axes),
        "txt_ids": torch.empty(text, axes),
        "guidance": torch.ones(batch) if config.guidance_embeds else None,
    }
