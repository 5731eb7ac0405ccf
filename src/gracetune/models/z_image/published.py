"""The denoiser of published Z-Image weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch import nn

_AXES_LENGTHS = (1536, 512, 512)
"""The only value of the published config file that differs from diffusers' defaults. All flavours have it."""


def build_published(flavour: str) -> nn.Module:
    build: Any = ZImageTransformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(axes_lens=list(_AXES_LENGTHS))
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for images of rows x columns tokens, each of one frame."""
    config, patch = model.config, model.config.all_patch_size[0]
    return {
        "x": [*torch.empty(batch, config.in_channels, 1, patch * rows, patch * columns)],
        "t": torch.ones(batch),
        "cap_feats": [*torch.empty(batch, text, config.cap_feat_dim)],
    }
