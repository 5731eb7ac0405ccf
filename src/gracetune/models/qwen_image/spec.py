"""The record of Qwen-Image and Qwen-Image-Edit."""

from __future__ import annotations

from diffusers import QwenImagePipeline

from gracetune.models.qwen_image.encode import load_latent_encoder, load_text_encoder
from gracetune.models.qwen_image.keys import KEYS
from gracetune.models.qwen_image.load import PARTS, inspect, use_fused_operations
from gracetune.models.qwen_image.predict import DEFAULT_NEGATIVE, ROUTING, check_sample, predict, sample
from gracetune.models.qwen_image.tiny import build_tiny
from gracetune.models.spec import AttentionCalls, FromEmbeddings, ModelFacts, ModelSpec

# Attention and both feed-forwards, without the modulation: musubi-tuner's default, and what the memory estimate counts.
# SimpleTuner and diffusers' own script only train the image half of the attention.
_LAYERS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}_mlp.{name}" for stream in ("img", "txt") for name in ("net.0.proj", "net.2")),
)


def _embeddings_rejection(facts: ModelFacts) -> str | None:
    if facts.details["pipeline"] == QwenImagePipeline.__name__:
        return None
    return "its text encoder also reads the images to edit"


SPEC = ModelSpec(
    family="qwen_image",
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
    default_targets=tuple(f"transformer_blocks.*.{layer}" for layer in _LAYERS),
    repeated_blocks=("QwenImageTransformerBlock",),
    build_tiny=build_tiny,
    adjust=use_fused_operations,
    from_embeddings=FromEmbeddings(PARTS.load_pipeline_without_text, _embeddings_rejection, DEFAULT_NEGATIVE),
    attention=AttentionCalls(masked=True),  # captions of different lengths in one batch
    token_routing=ROUTING,
)
