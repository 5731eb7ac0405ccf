"""Tiny FLUX.1 models: the published classes, packing and noise shift, with narrow layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextModel

from gracetune.models.common.tiny_parts import (
    WIDTH,
    TinyWeights,
    build_part,
    clip_text_config,
    clip_tokenizer,
    save,
    t5_encoder,
    t5_tokenizer,
)


@dataclass(frozen=True)
class _Recipe:
    pipeline: Any = FluxPipeline
    distilled: bool = False
    """Distilled to few steps: no guidance input, no resolution-dependent shift, shorter captions."""


_RECIPES = {
    "dev": _Recipe(),
    "krea": _Recipe(),
    "schnell": _Recipe(distilled=True),
    "kontext": _Recipe(FluxKontextPipeline),
}


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model of one flavour into `folder`, in diffusers' layout."""
    recipe, weights = _RECIPES[flavour], TinyWeights(seed)
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer(256 if recipe.distilled else 512)
    config = clip_text_config(tokenizer)
    pipeline = build_part(
        recipe.pipeline,
        scheduler=_scheduler(recipe),
        vae=_vae(weights),
        text_encoder=weights.build(CLIPTextModel, config),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(weights, len(tokenizer_2)),
        tokenizer_2=tokenizer_2,
        transformer=_transformer(weights, recipe),
    )
    return save(pipeline, folder)


def _transformer(weights: TinyWeights, recipe: _Recipe) -> Any:
    return weights.build(
        FluxTransformer2DModel,
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=not recipe.distilled,
        axes_dims_rope=(4, 6, 6),
    )


def _vae(weights: TinyWeights) -> Any:
    return weights.build(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=16,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _scheduler(recipe: _Recipe) -> Any:
    if recipe.distilled:
        return build_part(FlowMatchEulerDiscreteScheduler, shift=1.0)
    return build_part(
        FlowMatchEulerDiscreteScheduler,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
