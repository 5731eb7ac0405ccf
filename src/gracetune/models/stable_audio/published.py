"""The denoiser of published Stable Audio weights on the meta device: names and shapes without weights."""

from __future__ import annotations

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
