"""AuraFlow in miniature: the published classes and noise shift, with narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, AutoencoderKL, FlowMatchEulerDiscreteScheduler
from transformers import UMT5Config, UMT5EncoderModel

from gracetune.extension import TINY_WIDTH, TinyWeights, build_part, save_tiny, t5_options, t5_tokenizer
from gracetune_auraflow.footprint import CAPTION_TOKENS

_FLAVOURS = ("v0.3",)


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Writes the tiny model into `folder`, in diffusers' layout."""
    if flavour not in _FLAVOURS:
        raise KeyError(flavour)
    weights, tokenizer = TinyWeights(seed), t5_tokenizer(CAPTION_TOKENS)
    pipeline = build_part(
        AuraFlowPipeline,
        tokenizer=tokenizer,
        text_encoder=weights.build(UMT5EncoderModel, UMT5Config(**t5_options(len(tokenizer)))),
        vae=_vae(weights),
        transformer=_transformer(weights),
        scheduler=build_part(FlowMatchEulerDiscreteScheduler, shift=1.73),
    )
    return save_tiny(pipeline, folder)


def _transformer(weights: TinyWeights) -> Any:
    return weights.build(
        AuraFlowTransformer2DModel,
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        num_attention_heads=2,
        attention_head_dim=TINY_WIDTH // 2,
        joint_attention_dim=TINY_WIDTH,
        caption_projection_dim=TINY_WIDTH,
        pos_embed_max_size=256,
    )


def _vae(weights: TinyWeights) -> Any:
    return weights.build(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
        sample_size=32,
        scaling_factor=0.13025,
    )
