"""The denoiser of published Stable Audio weights without its weights: names and shapes, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel
from torch import nn


def build_published(flavour: str) -> nn.Module:
    """The one published flavour is what diffusers builds by default."""
    build: Any = StableAudioDiTModel
    with torch.device("meta"):
        model: nn.Module = build()
    return model
