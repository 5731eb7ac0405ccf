"""The denoiser of published Stable Audio weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel
from torch import nn


def build_published(flavour: str) -> nn.Module:
    """The single published flavour has diffusers' default configuration."""
    build: Any = StableAudioDiTModel
    with torch.device("meta"):
        model: nn.Module = build()
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for rows x columns tokens: the global one, and the latents' columns."""
    config = model.config
    tokens = rows * columns
    angles = torch.empty(tokens, config.attention_head_dim // 2, dtype=torch.float32)
    return {
        "hidden_states": torch.empty(batch, config.in_channels, tokens - 1),
        "timestep": torch.ones(batch),
        "encoder_hidden_states": torch.empty(batch, text, config.cross_attention_input_dim),
        "global_hidden_states": torch.empty(batch, 1, config.global_states_input_dim),
        "rotary_embedding": (angles, angles.clone()),
    }
