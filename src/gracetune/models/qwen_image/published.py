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
