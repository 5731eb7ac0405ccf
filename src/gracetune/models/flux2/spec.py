"""The record of FLUX.2."""

from __future__ import annotations

from functools import partial

from gracetune.models.flux2.attention import use_contiguous_gradients
from gracetune.models.flux2.encode import load_latent_encoder, load_text_encoder
from gracetune.models.flux2.keys import KEYS
from gracetune.models.flux2.load import build_denoiser, inspect, load_denoiser, load_pipeline
from gracetune.models.flux2.predict import check_sample, predict, sample
from gracetune.models.flux2.tiny import build_tiny
from gracetune.models.spec import FromEmbeddings, ModelSpec

_DOUBLE = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}.{name}" for stream in ("ff", "ff_context") for name in ("linear_in", "linear_out")),
)
_SINGLE = ("attn.to_qkv_mlp_proj", "attn.to_out")

SPEC = ModelSpec(
    family="flux2",
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
    default_targets=(
        *(f"transformer_blocks.*.{layer}" for layer in _DOUBLE),
        *(f"single_transformer_blocks.*.{layer}" for layer in _SINGLE),
    ),
    repeated_blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    build_tiny=build_tiny,
    adjust=use_contiguous_gradients,
    from_embeddings=FromEmbeddings(partial(load_pipeline, with_text=False)),
)
