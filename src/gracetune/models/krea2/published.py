"""The denoiser of published Krea 2 weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from torch import nn


def build_published(flavour: str) -> nn.Module:
    """Raw and Turbo have diffusers' default configuration."""
    build: Any = Krea2Transformer2DModel
    with torch.device("meta"):
        model: nn.Module = build()
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for an image of rows x columns tokens."""
    config = model.config
    return {
        "hidden_states": torch.empty(batch, rows * columns, config.in_channels),
        "encoder_hidden_states": torch.empty(batch, text, config.num_text_layers, config.text_hidden_dim),
        "timestep": torch.ones(batch),
        "position_ids": torch.empty(text + rows * columns, 3),
    }
