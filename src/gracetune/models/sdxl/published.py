"""The denoiser of published SDXL weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn

_DIFFERS: Mapping[str, Mapping[str, Any]] = {
    "base-1.0": {
        "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048,
        "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip
"""Flavour -> values of the published config file that differ from diffusers' defaults."""


def build_published(flavour: str) -> nn.Module:
    build: Any = UNet2DConditionModel
    with torch.device("meta"):
        model: nn.Module = build(**_DIFFERS.get(flavour, {}))
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for rows x columns latent pixels."""
    config = model.config
    sizes = 6
    pooled = config.projection_class_embeddings_input_dim - sizes * config.addition_time_embed_dim
    return {
        "sample": torch.empty(batch, config.in_channels, rows, columns),
        "timestep": torch.ones(batch),
        "encoder_hidden_states": torch.empty(batch, text, config.cross_attention_dim),
        "added_cond_kwargs": {"text_embeds": torch.empty(batch, pooled), "time_ids": torch.empty(batch, sizes)},
    }
