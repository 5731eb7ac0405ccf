"""The record of Stable Audio Open."""

from __future__ import annotations

from gracetune.models.spec import AttentionCalls, ModelSpec
from gracetune.models.stable_audio.encode import load_latent_encoder, load_text_encoder
from gracetune.models.stable_audio.keys import KEYS
from gracetune.models.stable_audio.load import build_denoiser, inspect, load_denoiser, load_pipeline
from gracetune.models.stable_audio.predict import check_sample, predict, sample
from gracetune.models.stable_audio.tiny import build_tiny

_LAYERS = (
    *(f"attn{number}.to_{part}" for number in (1, 2) for part in ("q", "k", "v", "out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)

SPEC = ModelSpec(
    family="stable_audio",
    inspect=inspect,
    load_denoiser=load_denoiser,
    build_denoiser=build_denoiser,
    load_latent_encoder=load_latent_encoder,
    load_text_encoder=load_text_encoder,
    predict=predict,
    load_pipeline=load_pipeline,
    sample=sample,
    check_sample=check_sample,
    keys=KEYS,
    default_targets=tuple(f"transformer_blocks.*.{layer}" for layer in _LAYERS),
    repeated_blocks=("StableAudioDiTBlock",),
    build_tiny=build_tiny,
    from_embeddings="its pipeline projects the text encoder's output, but the cache holds what is already projected",
    attention=AttentionCalls(dispatched=False, head_dim=64),
)
