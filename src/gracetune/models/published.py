"""The denoisers of the published weights without their weights: names and shapes, on the meta device.

For questions about a model nobody has downloaded here. The numbers are those of the config files published with each
set of weights; what is not named is diffusers' default, which is the largest model of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gracetune.config.families import INSTALLED, find_flavour, flavours
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem

_FROM_IMAGE_2_1 = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_DIFFERS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("wan", "i2v-14b-2.2"): {"in_channels": 36},
    ("wan", "ti2v-5b-2.2"): {
        "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48,
    },
    ("wan", "t2v-1.3b-2.1"): {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    ("wan", "i2v-14b-480p-2.1"): _FROM_IMAGE_2_1,
    ("wan", "i2v-14b-720p-2.1"): _FROM_IMAGE_2_1,
    ("qwen_image", "edit-2511"): {"zero_cond_t": True},
    ("flux", "dev"): {"guidance_embeds": True},
    ("flux", "krea"): {"guidance_embeds": True},
    ("flux", "kontext"): {"guidance_embeds": True},
    ("sdxl", "base-1.0"): {
        "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048,
        "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip


def build_published(family: str, flavour: str) -> nn.Module:
    """The denoiser of one flavour; both experts of a dual model look the same."""
    if find_flavour(family, flavour) is None:
        names = [known.name for known in flavours(family)]
        raise ConfigError([Problem("--flavour", flavour, ", ".join(names), nearest(flavour, names) or names[0])])
    if INSTALLED.has(family):
        installed: nn.Module = INSTALLED.part(family, "published", "build_published")(flavour)
        return installed
    with torch.device("meta"):
        model: nn.Module = _class(family)(**_DIFFERS.get((family, flavour), {}))
    return model


def _class(family: str) -> Any:
    import diffusers  # seconds: only when a model is asked for

    return {
        "wan": diffusers.WanTransformer3DModel,
        "qwen_image": diffusers.QwenImageTransformer2DModel,
        "flux": diffusers.FluxTransformer2DModel,
        "sdxl": diffusers.UNet2DConditionModel,
        "stable_audio": diffusers.StableAudioDiTModel,
    }[family]
