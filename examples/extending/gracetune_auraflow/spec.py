"""AuraFlow: everything gracetune asks of a family, in one bundle."""

from __future__ import annotations

from gracetune.extension import AttentionCalls, ModelSpec
from gracetune_auraflow import FAMILY
from gracetune_auraflow.encode import load_latent_encoder, load_text_encoder
from gracetune_auraflow.keys import KEYS
from gracetune_auraflow.load import build_denoiser, inspect, load_denoiser, load_pipeline
from gracetune_auraflow.predict import predict
from gracetune_auraflow.sample import sample
from gracetune_auraflow.tiny import build_tiny

_FEED_FORWARD = ("linear_1", "linear_2", "out_projection")
_JOINT = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}.{name}" for stream in ("ff", "ff_context") for name in _FEED_FORWARD),
)
_SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", *(f"ff.{name}" for name in _FEED_FORWARD))

SPEC = ModelSpec(
    family=FAMILY,
    inspect=inspect,
    load_denoiser=load_denoiser,
    build_denoiser=build_denoiser,
    load_latent_encoder=load_latent_encoder,
    load_text_encoder=load_text_encoder,
    predict=predict,
    load_pipeline=load_pipeline,
    sample=sample,
    keys=KEYS,
    default_targets=(
        *(f"joint_transformer_blocks.*.{layer}" for layer in _JOINT),
        *(f"single_transformer_blocks.*.{layer}" for layer in _SINGLE),
    ),
    repeated_blocks=("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"),
    build_tiny=build_tiny,
    attention=AttentionCalls(dispatched=False, head_dim=256),
)
