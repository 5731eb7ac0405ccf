"""The record of SDXL."""

from __future__ import annotations

from functools import partial

from gracetune.models.sdxl.encode import load_latent_encoder, load_text_encoder, sizes_per_use
from gracetune.models.sdxl.keys import KEYS
from gracetune.models.sdxl.load import build_denoiser, inspect, load_denoiser, load_pipeline
from gracetune.models.sdxl.predict import check_sample, predict, sample
from gracetune.models.sdxl.tiny import build_tiny
from gracetune.models.spec import AttentionCalls, FromEmbeddings, ModelSpec

# Every layer of the transformer blocks, as kohya's scripts train. Without the projections around them (proj_in,
# proj_out), which are no default targets of the footprint either.
_LAYERS = (
    *(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)

SPEC = ModelSpec(
    family="sdxl",
    inspect=inspect,
    load_denoiser=load_denoiser,
    build_denoiser=build_denoiser,
    load_latent_encoder=load_latent_encoder,
    load_text_encoder=load_text_encoder,
    predict=predict,
    graph_inputs=dict,
    load_pipeline=load_pipeline,
    sample=sample,
    check_sample=check_sample,
    rescales_guidance=True,
    keys=KEYS,
    default_targets=tuple(
        f"{part}.attentions.*.transformer_blocks.*.{layer}"
        for part in ("down_blocks.*", "mid_block", "up_blocks.*")
        for layer in _LAYERS
    ),
    # What kohya's scripts and ai-toolkit also train if a rank for convolutions is given.
    conv_targets=("ResnetBlock2D", "Downsample2D", "Upsample2D"),
    repeated_blocks=("BasicTransformerBlock",),
    build_tiny=build_tiny,
    per_use=sizes_per_use,
    from_embeddings=FromEmbeddings(partial(load_pipeline, with_text=False)),
    attention=AttentionCalls(dispatched=False, head_dim=64),
)
