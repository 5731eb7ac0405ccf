"""Encode images and captions for AuraFlow's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gracetune.extension import (
    EncodeOptions,
    ImageCodec,
    ImageLatents,
    LatentEncoder,
    ModelSource,
    PartPlacement,
    PipelineText,
    Prompt,
    TextEncoder,
    TruncatedTexts,
    encoder_id,
    files_digest,
    padded_tokens,
)
from gracetune_auraflow.footprint import CAPTION_TOKENS
from gracetune_auraflow.load import TRANSFORMER, around, encoding_dtype, load_vae, text_part

if TYPE_CHECKING:
    from gracetune.extension import Entry


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    dtype = encoding_dtype(source, placement)
    vae: Any = load_vae(source, replace(placement, dtype=dtype))
    channels = vae.config.latent_channels
    codec = ImageCodec((0.0,) * channels, (vae.config.scaling_factor,) * channels, placement.dtype)
    settings = {
        "class": type(vae).__name__,
        "dtype": f"{dtype}, kept as {placement.dtype}",
        "posterior": options.posterior,
    }
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    pipeline = around(source, {**text_part(source, placement), "vae": None, "scheduler": None, TRANSFORMER: None})
    settings = {
        "class": type(pipeline).__name__,
        "dtype": str(placement.dtype),
        "tokens": str(CAPTION_TOKENS),
        "tokenizer": files_digest(source.part("tokenizer")),
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    return PipelineText(pipeline, identity, _encode, device=placement.device)


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], cut: TruncatedTexts) -> list[Entry]:
    """Always all tokens: what stands behind the caption is zero, and the transformer was trained with it in sight.

    As the pipeline's `encode_prompt`, which makes tokens of every text twice to warn of long ones. `cut` collects them:
    a run shows one note for all of them.
    """
    texts = [prompt.text for prompt in prompts]
    tokens, long = padded_tokens(pipeline.tokenizer, texts, CAPTION_TOKENS)
    cut.add(f"{CAPTION_TOKENS} tokens", (texts[number] for number in long))
    mask = tokens.attention_mask.to(device)
    embeds = pipeline.text_encoder(input_ids=tokens.input_ids.to(device), attention_mask=mask)[0]
    return [{"prompt_embeds": row} for row in embeds * mask.unsqueeze(-1)]
