"""The denoiser of published Qwen-Image weights without its weights: names and shapes, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import nn

_DIFFERS: Mapping[str, Mapping[str, Any]] = {"edit-2511": {"zero_cond_t": True}}
"""Flavour -> what differs from diffusers' defaults in the published config file."""


def build_published(flavour: str) -> nn.Module:
    build: Any = QwenImageTransformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(**_DIFFERS.get(flavour, {}))
    return model
