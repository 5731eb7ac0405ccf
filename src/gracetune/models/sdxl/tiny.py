"""Tiny SDXL models: three levels, two text encoders and the published noise schedule, with narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, clip_text_config, clip_tokenizer, save

DdpmPrediction = Literal["epsilon", "v_prediction"]

_TIME_WIDTH = 8
_SIZES = 6
"""How many numbers the U-Net is conditioned on: height and width of the original size, crop corner and target size."""
_FLAVOURS = ("base-1.0",)


def build_tiny(
    folder: Path,
    flavour: str,
    *,
    seed: int = 0,
    prediction: DdpmPrediction = "epsilon",
    zero_terminal_snr: bool = False,
) -> Path:
    """Write the tiny model into `folder`, in diffusers' layout.

    `prediction` and `zero_terminal_snr` are written to the scheduler's config, as in published v-prediction weights.
    """
    if flavour not in _FLAVOURS:
        raise KeyError(flavour)
    weights, tokenizer, tokenizer_2 = TinyWeights(seed), clip_tokenizer(), clip_tokenizer(pad_token="!")
    config, config_2 = clip_text_config(tokenizer), clip_text_config(tokenizer_2, act="gelu")
    pipeline = build_part(
        StableDiffusionXLPipeline,
        vae=_vae(weights),
        text_encoder=weights.build(CLIPTextModel, config),
        text_encoder_2=weights.build(CLIPTextModelWithProjection, config_2),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        unet=_unet(weights),
        scheduler=_scheduler(prediction, zero_terminal_snr=zero_terminal_snr),
    )
    return save(pipeline, folder)


def _unet(weights: TinyWeights) -> Any:
    return weights.build(
        UNet2DConditionModel,
        sample_size=4,
        block_out_channels=(WIDTH // 2, WIDTH, WIDTH),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,  # as published: the block numbers in the original model's layer names depend on it
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(1, 2, 4),  # diffusers reads this as the number of heads
        cross_attention_dim=2 * WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_WIDTH,
        projection_class_embeddings_input_dim=WIDTH + _SIZES * _TIME_WIDTH,
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


def _scheduler(prediction: DdpmPrediction, *, zero_terminal_snr: bool) -> Any:
    return build_part(
        EulerDiscreteScheduler,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="trailing" if zero_terminal_snr else "leading",
        prediction_type=prediction,
        rescale_betas_zero_snr=zero_terminal_snr,
    )
