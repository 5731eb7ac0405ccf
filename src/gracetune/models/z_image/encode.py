"""Encoding images and captions for Z-Image's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gracetune.cache.encoder import LatentEncoder, Prompt, TextEncoder
from gracetune.models.common.chat_text import in_chat_template
from gracetune.models.common.encoding import TruncatedTexts, encoder_id, padded_tokens
from gracetune.models.common.image_latents import ImageCodec, ImageLatents
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.fingerprint import files_digest
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement
from gracetune.models.z_image.load import PARTS

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

MAX_TOKENS = 512
"""Caption tokens, with those of the chat template: the pipeline's default."""
_LAYER = -2
"""The hidden states that the transformer reads: the input of the text encoder's last layer."""


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    vae: Any = PARTS.load_vae(source, placement)
    channels = vae.config.latent_channels
    codec = ImageCodec(
        offset=(vae.config.shift_factor,) * channels,
        scale=(vae.config.scaling_factor,) * channels,
        dtype=placement.dtype,
    )
    settings = {"class": type(vae).__name__, "dtype": str(placement.dtype), "posterior": options.posterior}
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    pipeline = PARTS.text_pipeline(source, placement)
    settings = {
        "class": type(pipeline.text_encoder).__name__,
        "dtype": str(placement.dtype),
        "layer": str(_LAYER),
        "tokens": str(MAX_TOKENS),
        "template": in_chat_template(pipeline.tokenizer, "", thinking=True),
        "tokenizer": files_digest(source.part("tokenizer")),
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    return PipelineText(pipeline, identity, _encode, device=placement.device)


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts) -> list[Entry]:
    """The result of the pipeline's `encode_prompt`: each caption has a length of its own.

    Entries have no mask: the batch source builds one if the captions of a batch differ in length, and only then.
    """
    texts = [prompt.text for prompt in prompts]
    rendered = [in_chat_template(pipeline.tokenizer, text, thinking=True) for text in texts]
    tokens, long = padded_tokens(pipeline.tokenizer, rendered, MAX_TOKENS)
    truncated.add(f"{MAX_TOKENS} tokens", (texts[number] for number in long))
    mask = tokens.attention_mask.to(device).bool()
    output = pipeline.text_encoder(tokens.input_ids.to(device), attention_mask=mask, output_hidden_states=True)
    return [{"prompt_embeds": row[own]} for row, own in zip(output.hidden_states[_LAYER], mask, strict=True)]
