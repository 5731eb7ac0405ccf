"""Tiny Stable Audio models: stereo at 44.1 kHz, 2048 audio samples per latent column, with narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderOobleck,
    EDMDPMSolverMultistepScheduler,
    StableAudioDiTModel,
    StableAudioPipeline,
    StableAudioProjectionModel,
)

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, save, t5_encoder, t5_tokenizer

_COLUMNS = 32
"""Latent columns the pipeline generates: 1.5 seconds. Training may use more, as no weight depends on it."""
_CHANNELS = 16
"""The published weights have 64. Every layer of this VAE's encoder is at least twice as wide as its latents."""
_LONGEST_SECONDS = 512
"""The largest number of seconds the conditioning supports. Audio itself is shorter."""
_FLAVOURS = ("open-1.0",)


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model into `folder`, in diffusers' layout."""
    if flavour not in _FLAVOURS:
        raise KeyError(flavour)
    weights, tokenizer = TinyWeights(seed), t5_tokenizer(128)
    pipeline = build_part(
        StableAudioPipeline,
        vae=_vae(weights),
        text_encoder=t5_encoder(weights, len(tokenizer)),
        projection_model=weights.build(StableAudioProjectionModel, WIDTH, WIDTH, 0, _LONGEST_SECONDS),
        tokenizer=tokenizer,
        transformer=_transformer(weights),
        scheduler=_scheduler(),
    )
    return save(pipeline, folder)


def _transformer(weights: TinyWeights) -> Any:
    return weights.build(
        StableAudioDiTModel,
        sample_size=_COLUMNS,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        attention_head_dim=WIDTH // 2,
        cross_attention_dim=WIDTH,
        cross_attention_input_dim=WIDTH,
        global_states_input_dim=2 * WIDTH,  # start and end of the audio
        time_proj_dim=WIDTH,
    )


def _vae(weights: TinyWeights) -> Any:
    return weights.build(
        AutoencoderOobleck,
        encoder_hidden_size=2 * _CHANNELS,
        decoder_channels=_CHANNELS,
        decoder_input_channels=_CHANNELS,
        channel_multiples=[1, 1, 1, 1, 1],
    )


def _scheduler() -> Any:
    """Published folders name `CosineDPMSolverMultistepScheduler`, which needs torchsde. This one needs nothing."""
    return build_part(
        EDMDPMSolverMultistepScheduler,
        sigma_min=0.3,
        sigma_max=500.0,
        sigma_data=1.0,
        sigma_schedule="exponential",
        prediction_type="v_prediction",
    )
