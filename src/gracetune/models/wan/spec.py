"""The record of Wan 2.1 and 2.2."""

from __future__ import annotations

from functools import partial

from gracetune.models.spec import FromEmbeddings, ModelSpec
from gracetune.models.wan.encode import load_latent_encoder, load_text_encoder
from gracetune.models.wan.keys import KEYS
from gracetune.models.wan.load import build_denoiser, inspect, load_denoiser, load_pipeline, use_fused_operations
from gracetune.models.wan.predict import ROUTING, check_sample, graph_inputs, predict, sample
from gracetune.models.wan.tiny import build_tiny

_LAYERS = (
    *(f"attn1.to_{part}" for part in ("q", "k", "v", "out.0")),
    "attn2.to_q",
    # Matches to_k and to_v, and also add_k_proj and add_v_proj of the 2.1 image-to-video weights. Those need no pattern
    # of their own, because a pattern that matches nothing is an error.
    "attn2.[at]*_k*",
    "attn2.[at]*_v*",
    "attn2.to_out.0",
    "ffn.net.0.proj",
    "ffn.net.2",
)

SPEC = ModelSpec(
    family="wan",
    inspect=inspect,
    load_denoiser=load_denoiser,
    build_denoiser=build_denoiser,
    adjust=use_fused_operations,
    load_latent_encoder=load_latent_encoder,
    load_text_encoder=load_text_encoder,
    predict=predict,
    graph_inputs=graph_inputs,
    load_pipeline=load_pipeline,
    sample=sample,
    check_sample=check_sample,
    keys=KEYS,
    default_targets=tuple(f"blocks.*.{layer}" for layer in _LAYERS),
    repeated_blocks=("WanTransformerBlock",),
    build_tiny=build_tiny,
    from_embeddings=FromEmbeddings(partial(load_pipeline, with_text=False)),
    token_routing=ROUTING,
)
