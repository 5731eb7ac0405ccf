"""The denoiser of the published weights without its weights: for `gracetune adapter verify --flavour v0.3`."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel
from torch import nn

_POSITIONS = {"v0.3": 9216}


def build_published(flavour: str) -> nn.Module:
    """On the meta device. What is not named here is diffusers' default, which is the published model."""
    build: Any = AuraFlowTransformer2DModel
    with torch.device("meta"):
        model: nn.Module = build(pos_embed_max_size=_POSITIONS[flavour])
    return model
