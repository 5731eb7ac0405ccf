"""The record of Z-Image."""

from __future__ import annotations

from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

from gracetune.models.spec import AttentionCalls, FromEmbeddings, ModelSpec
from gracetune.models.z_image.attention import use_pairwise_attention
from gracetune.models.z_image.encode import load_latent_encoder, load_text_encoder
from gracetune.models.z_image.keys import KEYS
from gracetune.models.z_image.load import PARTS, inspect
from gracetune.models.z_image.predict import check_sample, predict, sample
from gracetune.models.z_image.tiny import build_tiny

# Attention and feed-forward of the main blocks, without the modulation and the refiners before them: ai-toolkit's
# blocks, and what the memory estimate counts. SimpleTuner trains the attention alone, of the refiners too.
_LAYERS = (
    *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
)

SPEC = ModelSpec(
    family="z_image",
    inspect=inspect,
    load_denoiser=PARTS.load_denoiser,
    build_denoiser=PARTS.build_denoiser,
    load_latent_encoder=load_latent_encoder,
    load_text_encoder=load_text_encoder,
    predict=predict,
    load_pipeline=PARTS.load_pipeline,
    sample=sample,
    check_sample=check_sample,
    keys=KEYS,
    default_targets=tuple(f"layers.*.{layer}" for layer in _LAYERS),
    repeated_blocks=("ZImageTransformerBlock",),
    token_multiple=SEQ_MULTI_OF,
    build_tiny=build_tiny,
    adjust=use_pairwise_attention,
    from_embeddings=FromEmbeddings(PARTS.load_pipeline_without_text),
    attention=AttentionCalls(masked=True),  # captions of different lengths in one batch
)
