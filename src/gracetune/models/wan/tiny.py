"""Tiny Wan models: the published classes, scale factors, channels and noise boundaries, with narrow layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, save, t5_options, t5_tokenizer

_IMAGE_SIDE = 28
"""Input side of the image encoder: 2 x 2 patches of 14, the smallest possible."""


@dataclass(frozen=True)
class _Recipe:
    channels: int = 16
    boundary: float | None = None
    """Noise level below which the second expert takes over. None: there is no second expert."""
    from_image: bool = False
    image_encoder: bool = False
    expand_timesteps: bool = False
    flow_shift: float = 3.0


_RECIPES = {
    "t2v-14b-2.2": _Recipe(boundary=0.875),
    "i2v-14b-2.2": _Recipe(boundary=0.9, from_image=True),
    "ti2v-5b-2.2": _Recipe(channels=48, expand_timesteps=True, flow_shift=5.0),
    "t2v-1.3b-2.1": _Recipe(),
    "t2v-14b-2.1": _Recipe(flow_shift=5.0),
    "i2v-14b-480p-2.1": _Recipe(from_image=True, image_encoder=True),
    "i2v-14b-720p-2.1": _Recipe(from_image=True, image_encoder=True, flow_shift=5.0),
}


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model of one flavour into `folder`, in diffusers' layout."""
    recipe, weights = _RECIPES[flavour], TinyWeights(seed)
    tokenizer = t5_tokenizer()
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": _text_encoder(weights, tokenizer),
        "vae": _vae(weights, recipe),
        "scheduler": _scheduler(recipe),
        "transformer": _transformer(weights, recipe),
        "transformer_2": None if recipe.boundary is None else _transformer(weights, recipe),
    }
    options = {"boundary_ratio": recipe.boundary, "expand_timesteps": recipe.expand_timesteps}
    if not recipe.from_image:
        return save(build_part(WanPipeline, **parts, **options), folder)
    image_parts = {"image_encoder": None, "image_processor": None}
    if recipe.image_encoder:
        image_parts = {"image_encoder": _image_encoder(weights), "image_processor": _image_processor()}
    return save(build_part(WanImageToVideoPipeline, **parts, **image_parts, **options), folder)


def _text_encoder(weights: TinyWeights, tokenizer: PreTrainedTokenizerFast) -> Any:
    return weights.build(UMT5EncoderModel, UMT5Config(**t5_options(len(tokenizer))))


def _transformer(weights: TinyWeights, recipe: _Recipe) -> Any:
    # Input of image-to-video weights: latents, first-frame latents, and its mask with a channel for each of 4 frames.
    condition = recipe.channels + 4 if recipe.from_image else 0
    options = {
        "num_attention_heads": 2,
        "attention_head_dim": WIDTH // 2,
        "in_channels": recipe.channels + condition,
        "out_channels": recipe.channels,
        "text_dim": WIDTH,
        "freq_dim": WIDTH,
        "ffn_dim": 2 * WIDTH,
        "num_layers": 2,
        "image_dim": WIDTH if recipe.image_encoder else None,
        "added_kv_proj_dim": WIDTH if recipe.image_encoder else None,
    }
    return weights.build(WanTransformer3DModel, **options)


def _vae(weights: TinyWeights, recipe: _Recipe) -> Any:
    narrow = {"base_dim": 8, "num_res_blocks": 1, "z_dim": recipe.channels}
    if recipe.channels == 16:
        return weights.build(AutoencoderKLWan, **narrow)
    large = {
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "is_residual": True,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * recipe.channels,
        "latents_std": [1.0] * recipe.channels,
    }
    return weights.build(AutoencoderKLWan, **narrow, **large)


def _scheduler(recipe: _Recipe) -> Any:
    return build_part(
        UniPCMultistepScheduler,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=recipe.flow_shift,
        num_train_timesteps=1000,
    )


def _image_encoder(weights: TinyWeights) -> Any:
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=3,  # the pipeline reads the second to last
        num_attention_heads=4,
        image_size=_IMAGE_SIDE,
        patch_size=14,
    )
    return weights.build(CLIPVisionModel, config)


def _image_processor() -> Any:
    side = {"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}
    return build_part(CLIPImageProcessorPil, size=side, crop_size=side)
