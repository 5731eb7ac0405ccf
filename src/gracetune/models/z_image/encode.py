"""Encoding images and captions for Z-Image's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracetune.cache.encoder import LatentEncoder, Prompt, TextEncoder
from gracetune.models.common.encoding import TruncatedTexts, encoder_id
from gracetune.models.common.image_latents import ImageCodec, ImageLatents
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.fingerprint import files_digest
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement
from gracetune.models.z_image.load import TRANSFORMER, around, load_vae, text_parts

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

MAX_TOKENS = 512
"""Caption tokens, with those of the chat template: the pipeline's default."""
_LAYER = -2
"""The hidden states that the transformer reads: the input of the text encoder's last layer."""
_MEASURED = 1024
"""Captions whose tokens are in memory at a time when only their lengths are needed."""


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    vae: Any = load_vae(source, placement)
    channels = vae.config.latent_channels
    codec = ImageCodec(
        offset=(vae.config.shift_factor,) * channels,
        scale=(vae.config.scaling_factor,) * channels,
        dtype=placement.dtype,
    )
    settings = {"class": type(vae).__name__, "dtype": str(placement.dtype), "posterior": options.posterior}
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    pipeline = around(source, {**text_parts(source, placement), "vae": None, "scheduler": None, TRANSFORMER: None})
    settings = {
        "class": type(pipeline.text_encoder).__name__,
        "dtype": str(placement.dtype),
        "layer": str(_LAYER),
        "tokens": str(MAX_TOKENS),
        "template": _in_template(pipeline, ""),
        "tokenizer": files_digest(source.part("tokenizer")),
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    return PipelineText(pipeline, identity, _encode, device=placement.device, lengths=_lengths)


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts) -> list[Entry]:
    """Entries without a mask: the batch source builds one if the captions of a batch differ in length, and only then.

    Equal to the pipeline's `encode_prompt`, which pads every caption to the full length and drops the padding from the
    result. Only captions with the same number of tokens are batched, so that nothing is padded.
    """
    tokens = _tokens(pipeline, [prompt.text for prompt in prompts])
    truncated.add(
        f"{MAX_TOKENS} tokens",
        (prompt.text for prompt, own in zip(prompts, tokens, strict=True) if len(own) > MAX_TOKENS),
    )
    by_length: dict[int, list[int]] = {}
    for number, own in enumerate(tokens):
        by_length.setdefault(min(len(own), MAX_TOKENS), []).append(number)
    found: dict[int, Tensor] = {}
    for length, numbers in by_length.items():
        ids = torch.tensor([tokens[number][:length] for number in numbers], device=device)
        output = pipeline.text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        found |= zip(numbers, output.hidden_states[_LAYER], strict=True)
    return [{"prompt_embeds": found[number]} for number in range(len(prompts))]


def _in_template(pipeline: Any, text: str) -> str:
    message = [{"role": "user", "content": text}]
    result: str = pipeline.tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return result


def _tokens(pipeline: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, not truncated."""
    found: list[list[int]] = pipeline.tokenizer([_in_template(pipeline, text) for text in texts])["input_ids"]
    return found


def _lengths(pipeline: Any, texts: Sequence[str]) -> list[int]:
    return [
        min(len(own), MAX_TOKENS)
        for first in range(0, len(texts), _MEASURED)
        for own in _tokens(pipeline, texts[first : first + _MEASURED])
    ]
