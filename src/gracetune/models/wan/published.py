"""The denoiser of published Wan weights on the meta device: names and shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

IMAGE_TOKENS = 257
"""What the image encoder of the 2.1 image-to-video weights returns."""
_FROM_IMAGE_2_1 = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_DIFFERS: Mapping[str, Mapping[str, Any]] = {
    "i2v-14b-2.2": {"in_channels": 36},
    "ti2v-5b-2.2": {
        "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48,
    },
    "t2v-1.3b-2.1": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "i2v-14b-480p-2.1": _FROM_IMAGE_2_1,
    "i2v-14b-720p-2.1": _FROM_IMAGE_2_1,
}  # fmt: skip
"""Flavour -> values of the published config file that differ from diffusers' defaults."""


def build_published(flavour: str) -> nn.Module:
    build: Any = WanTransformer3DModel
    with torch.device("meta"):
        model: nn.Module = build(**_DIFFERS.get(flavour, {}))
    return model


def example_inputs(model: Any, *, batch: int, rows: int, columns: int, text: int) -> Mapping[str, Any]:
    """The denoiser's arguments for one frame of rows x columns tokens."""
    config = model.config
    _, high, wide = config.patch_size
    image = torch.empty(batch, config.in_channels, 1, high * rows, wide * columns)
    caption = torch.empty(batch, text, config.text_dim)
    given = {"hidden_states": image, "timestep": torch.ones(batch), "encoder_hidden_states": caption}
    if config.image_dim is not None:
        given["encoder_hidden_states_image"] = torch.empty(batch, IMAGE_TOKENS, config.image_dim)
    return given
