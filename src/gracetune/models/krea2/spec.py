"""The record of Krea 2."""

from __future__ import annotations

from functools import partial

from gracetune.models.krea2.attention import use_pairwise_attention
from gracetune.models.krea2.encode import load_latent_encoder, load_text_encoder
from gracetune.models.krea2.keys import KEYS
from gracetune.models.krea2.load import build_denoiser, inspect, load_denoiser, load_pipeline
from gracetune.models.krea2.predict import check_sample, predict, sample
from gracetune.models.krea2.tiny import build_tiny
from gracetune.models.spec import AttentionCalls, FromEmbeddings, ModelSpec

# Attention with its gate, and feed-forward, of the main blocks. ai-toolkit trains the blocks of the text fusion too;
# SimpleTuner trains the attention alone, without the gate, in both.
_LAYERS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_gate", "to_out.0")),
    *(f"ff.{name}" for name in ("gate", "up", "down")),
)

SPEC = ModelSpec(
    family="krea2",
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
    repeated_blocks=("Krea2TransformerBlock",),
    build_tiny=build_tiny,
    adjust=use_pairwise_attention,
    from_embeddings=FromEmbeddings(partial(load_pipeline, with_text=False)),
    attention=AttentionCalls(masked=True),  # captions of different lengths in one batch
)
