"""Encoding images and captions for FLUX.1's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gracetune.cache.encoder import LatentEncoder, Prompt, TextEncoder
from gracetune.models.common.encoding import TruncatedTexts, encoder_id, padded_tokens
from gracetune.models.common.image_latents import ImageCodec, ImageLatents
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.fingerprint import files_digest
from gracetune.models.flux.load import PARTS, inspect
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    vae: Any = PARTS.load_vae(source, placement)
    channels = vae.config.latent_channels
    codec = ImageCodec(
        offset=(vae.config.shift_factor or 0.0,) * channels,
        scale=(vae.config.scaling_factor,) * channels,
        dtype=placement.dtype,
        references=1 if inspect(source).flavour == "kontext" else 0,
    )
    settings = {"class": type(vae).__name__, "dtype": str(placement.dtype), "posterior": options.posterior}
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    tokens = inspect(source).details["caption_tokens"]
    pipeline = PARTS.text_pipeline(source, placement)
    settings = {
        "class": type(pipeline).__name__,
        "dtype": str(placement.dtype),
        "tokens": str(tokens),
        "tokenizer": files_digest(source.part("tokenizer")),
        "tokenizer_2": files_digest(source.part("tokenizer_2")),
    }
    identity = encoder_id("text", source, ["text_encoder", "text_encoder_2"], settings)
    return PipelineText(pipeline, identity, partial(_encode, tokens=tokens), device=placement.device)


def _encode(
    pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts, *, tokens: int
) -> list[Entry]:
    """The result of the pipeline's `encode_prompt`, which would tokenize every text several times to warn of long ones.

    Always `tokens` long: the transformer was trained with the padding, and no mask hides it.
    """
    texts = [prompt.text for prompt in prompts]
    clip, t5 = pipeline.text_encoder, pipeline.text_encoder_2
    clip_tokens, long_for_clip = padded_tokens(pipeline.tokenizer, texts, pipeline.tokenizer_max_length)
    t5_tokens, long_for_t5 = padded_tokens(pipeline.tokenizer_2, texts, tokens)
    pooled_from = f"{pipeline.tokenizer_max_length} tokens, for the pooled embedding"
    truncated.add(pooled_from, (texts[number] for number in long_for_clip))
    truncated.add(f"{tokens} tokens", (texts[number] for number in long_for_t5))
    pooled = clip(clip_tokens.input_ids.to(device)).pooler_output.to(clip.dtype)
    embeds = t5(t5_tokens.input_ids.to(device))[0].to(t5.dtype)
    return [{"prompt_embeds": row, "pooled_prompt_embeds": one} for row, one in zip(embeds, pooled, strict=True)]
