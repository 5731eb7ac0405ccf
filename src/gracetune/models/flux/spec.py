"""The record of FLUX.1."""

from __future__ import annotations

from gracetune.models.flux.encode import load_latent_encoder, load_text_encoder
from gracetune.models.flux.keys import KEYS
from gracetune.models.flux.load import PARTS, inspect, use_fused_operations
from gracetune.models.flux.predict import ROUTING, check_sample, predict, sample
from gracetune.models.flux.tiny import build_tiny
from gracetune.models.spec import FromEmbeddings, ModelSpec

_DOUBLE = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}.{name}" for stream in ("ff", "ff_context") for name in ("net.0.proj", "net.2")),
)
_SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out")

SPEC = ModelSpec(
    family="flux",
    inspect=inspect,
    load_denoiser=PARTS.load_denoiser,
    build_denoiser=PARTS.build_denoiser,
    load_latent_encoder=load_latent_encoder,
    load_text_encoder=load_text_encoder,
    predict=predict,
    graph_inputs=dict,
    load_pipeline=PARTS.load_pipeline,
    sample=sample,
    check_sample=check_sample,
    keys=KEYS,
    default_targets=(
        *(f"transformer_blocks.*.{layer}" for layer in _DOUBLE),
        *(f"single_transformer_blocks.*.{layer}" for layer in _SINGLE),
    ),
    repeated_blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    build_tiny=build_tiny,
    adjust=use_fused_operations,
    from_embeddings=FromEmbeddings(PARTS.load_pipeline_without_text),
    token_routing=ROUTING,
)
