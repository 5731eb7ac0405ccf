"""The denoiser of the published weights without its weights: for `gracetune adapter verify --flavour v0.3`, and for the
memory plan, which traces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel
from torch import nn

from gracetune_auraflow.footprint import REGISTERS

_POSITIONS = {"v0.3": 9216}


def build_published(flavour: str) -> nn.Module:
    """On the meta device. What is not named here is diffusers' default, which is the published model."""
    build: Any = AuraFlowTransformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(pos_embed_max_size=_POSITIONS[flavour])
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for an image of rows x columns tokens. Its registers count with the caption."""
    config = model.config
    patch = config.patch_size
    return {
        "hidden_states": torch.empty(batch, config.in_channels, patch * rows, patch * columns),
        "encoder_hidden_states": torch.empty(batch, text - REGISTERS, config.joint_attention_dim),
        "timestep": torch.ones(batch),
    }
