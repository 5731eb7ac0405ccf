"""Encoding images and captions for Krea 2's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gracetune.cache.encoder import LatentEncoder, Prompt, TextEncoder
from gracetune.models.common.encoding import TruncatedTexts, encoded_by_length, encoder_id, lengths_in_parts
from gracetune.models.common.image_latents import ImageCodec, ImageLatents
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.common.qwen3_vl import tapped_layers
from gracetune.models.fingerprint import files_digest
from gracetune.models.krea2.load import TRANSFORMER, around, load_vae, text_parts
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

MAX_TOKENS = 512
"""Caption tokens, with the end of the template: the pipeline's default."""


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    vae: Any = load_vae(source, placement)
    codec = ImageCodec(
        offset=tuple(vae.config.latents_mean),
        scale=tuple(1.0 / value for value in vae.config.latents_std),
        dtype=placement.dtype,
        video=True,
    )
    settings = {"class": type(vae).__name__, "dtype": str(placement.dtype), "posterior": options.posterior}
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    pipeline = around(source, {**text_parts(source, placement), "vae": None, "scheduler": None, TRANSFORMER: None})
    settings = {
        "class": type(pipeline.text_encoder).__name__,
        "dtype": str(placement.dtype),
        "layers": str(pipeline.text_encoder_select_layers),
        "tokens": str(MAX_TOKENS),
        "template": f"{pipeline.prompt_template_encode_prefix}{{}}{pipeline.prompt_template_encode_suffix}",
        "dropped tokens": str(pipeline.prompt_template_encode_start_idx),
        "tokenizer": files_digest(source.part("tokenizer")),
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    return PipelineText(pipeline, identity, _encode, device=placement.device, lengths=_lengths)


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts) -> list[Entry]:
    """The result of the pipeline's `encode_prompt` without its padding, which the transformer masks.

    The pipeline pads between caption and template end, and gives the padding no positions. Entries have no mask: the
    batch source builds one if the captions of a batch differ in length, and only then.
    """
    suffix, most = _suffix(pipeline), _most(pipeline)
    rows = _captions(pipeline, [prompt.text for prompt in prompts])
    truncated.add(f"{MAX_TOKENS} tokens", (one.text for one, row in zip(prompts, rows, strict=True) if len(row) > most))
    # `hidden_states[n]` is what layer n reads, so it is the output of the layer before.
    layers = [number - 1 for number in pipeline.text_encoder_select_layers]
    dropped = pipeline.prompt_template_encode_start_idx
    embeds = encoded_by_length(
        [[*row[:most], *suffix] for row in rows],
        lambda ids: tapped_layers(pipeline.text_encoder, ids, layers)[:, dropped:],
        device,
    )
    return [{"prompt_embeds": one} for one in embeds]


def _captions(pipeline: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of the template's beginning and each caption: one more than allowed if a caption is too long."""
    prefixed = [pipeline.prompt_template_encode_prefix + text for text in texts]
    found: list[list[int]] = pipeline.tokenizer(prefixed, truncation=True, max_length=_most(pipeline) + 1)["input_ids"]
    return found


def _suffix(pipeline: Any) -> list[int]:
    found: list[int] = pipeline.tokenizer(pipeline.prompt_template_encode_suffix)["input_ids"]
    return found


def _most(pipeline: Any) -> int:
    """The most tokens of the template's beginning and a caption."""
    ends: int = pipeline.prompt_template_encode_start_idx - pipeline.prompt_template_encode_num_suffix_tokens
    return MAX_TOKENS + ends


def _lengths(pipeline: Any, texts: Sequence[str]) -> list[int]:
    return lengths_in_parts(texts, lambda some: _captions(pipeline, some))
