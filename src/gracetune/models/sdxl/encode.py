"""Encoding images and captions for SDXL's U-Net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gracetune.cache.encoder import LatentEncoder, PerUse, Prompt, TextEncoder
from gracetune.config.run_config import Model
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.data.refs import SampleRef
from gracetune.models.common.encoding import TruncatedTexts, encoder_id, padded_tokens
from gracetune.models.common.image_latents import ImageCodec, ImageLatents
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.fingerprint import files_digest
from gracetune.models.sdxl.load import UNET, around, encoding_dtype, load_vae, text_parts
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    dtype = encoding_dtype(source, placement)
    vae: Any = load_vae(source, replace(placement, dtype=dtype))
    channels, factor = vae.config.latent_channels, vae.config.scaling_factor
    mean, std = vae.config.latents_mean or (0.0,) * channels, vae.config.latents_std or (1.0,) * channels
    codec = ImageCodec(tuple(mean), tuple(factor / value for value in std), placement.dtype, more=_sizes)
    settings = {
        "class": type(vae).__name__,
        "dtype": f"{dtype}, kept as {placement.dtype}",
        "posterior": options.posterior,
    }
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def _sizes(sample: Sample) -> Entry:
    return _time_ids(sample.ref, "original")


def _time_ids(ref: SampleRef, kind: str) -> Entry:
    """[6]: original size, crop corner and target size, each as height and width.

    `kind` (`model.size_conditioning`) selects what counts as the original size, and for `bucket` as the corner.
    A flipped image counts as one that was flipped before cropping, so the corner is measured from the other side.
    """
    fit, bucket = ref.fit, ref.bucket
    if fit is None:
        raise DataError(f"{ref.path}: no record of how this image was resized and cropped")
    if kind == "bucket":
        return {"time_ids": torch.tensor([bucket.height, bucket.width, 0, 0, bucket.height, bucket.width]).float()}
    left, top = fit.left, fit.top
    if ref.augmentation.flip_x:
        left = fit.resized[0] - bucket.width - left
    if ref.augmentation.flip_y:
        top = fit.resized[1] - bucket.height - top
    width, height = fit.original if kind == "original" else fit.resized
    return {"time_ids": torch.tensor([height, width, top, left, bucket.height, bucket.width]).float()}


def sizes_per_use(model: Model) -> PerUse | None:
    """The cache stores the size of the original file. Any other size conditioning is computed at each use. None: the
    cached sizes are used."""
    kind, drops = model.size_conditioning, model.drop_size_conditioning
    if kind == "original" and not drops:
        return None

    def sizes(ref: SampleRef) -> Entry:
        return {"time_ids": torch.zeros(6)} if drops and ref.caption.dropped else _time_ids(ref, kind)

    return sizes


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    pipeline = around(source, {**text_parts(source, placement), "vae": None, "scheduler": None, UNET: None})
    settings = {
        "class": type(pipeline).__name__,
        "dtype": str(placement.dtype),
        "tokenizer": files_digest(source.part("tokenizer")),
        "tokenizer_2": files_digest(source.part("tokenizer_2")),
    }
    identity = encoder_id("text", source, ["text_encoder", "text_encoder_2"], settings)
    return PipelineText(pipeline, identity, _encode, device=placement.device)


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts) -> list[Entry]:
    """The result of the pipeline's `encode_prompt`, which would tokenize every text five times to warn of long ones.

    Always 77 tokens: the U-Net was trained with the padding, and no mask hides it.
    """
    texts = [prompt.text for prompt in prompts]
    states, output = [], None
    for tokenizer, encoder in (
        (pipeline.tokenizer, pipeline.text_encoder),
        (pipeline.tokenizer_2, pipeline.text_encoder_2),
    ):
        tokens, long = padded_tokens(tokenizer, texts, tokenizer.model_max_length)
        truncated.add(f"{tokenizer.model_max_length} tokens", (texts[number] for number in long))
        output = encoder(tokens.input_ids.to(device), output_hidden_states=True)
        states.append(output.hidden_states[-2])
    assert output is not None, "the second encoder computes the pooled embedding"
    embeds, pooled = torch.cat(states, dim=-1).to(pipeline.text_encoder_2.dtype), output.text_embeds
    return [{"prompt_embeds": row, "pooled_prompt_embeds": one} for row, one in zip(embeds, pooled, strict=True)]
