"""The denoiser of published Qwen-Image weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import nn

_DIFFERS: Mapping[str, Mapping[str, Any]] = {"edit-2511": {"zero_cond_t": True}}
"""Flavour -> values of the published config file that differ from diffusers' defaults."""


def build_published(flavour: str) -> nn.Module:
    build: Any = QwenImageTransformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(**_DIFFERS.get(flavour, {}))
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for an image and a reference, each of rows x columns / 2 tokens."""
    config = model.config
    return {
        "hidden_states": torch.empty(batch, rows * columns, config.in_channels),
        "encoder_hidden_states": torch.empty(batch, text, config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "timestep": torch.ones(batch),
        "img_shapes": [[(1, rows, columns // 2)] * 2] * batch,
    }
