"""Encoding images and captions for Qwen-Image's transformer.

In the edit flavours a vision-language model embeds the caption together with the reference images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image
from torch import Tensor

from gracetune.cache.encoder import LatentEncoder, Prompt, TextEncoder
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.models.common.encoding import TruncatedTexts, encoded_by_length, encoder_id, lengths_in_parts
from gracetune.models.common.image_latents import ImageCodec, ImageLatents, to_image
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.fingerprint import files_digest
from gracetune.models.qwen_image.load import PARTS, inspect
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

MAX_TOKENS = 512
"""Caption tokens without references: the pipeline's default. The edit pipelines do not truncate."""
EDIT_IMAGE = 1024 * 1024
"""Pixels of the reference that the Edit pipeline passes to its text encoder. Hard-coded there as well."""
_REFERENCES = {"t2i": 0, "edit": 1, "edit-2509": None, "edit-2511": None}
"""Flavour -> supported number of references; None for any number."""


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    vae: Any = PARTS.load_vae(source, placement)
    codec = ImageCodec(
        offset=tuple(vae.config.latents_mean),
        scale=tuple(1.0 / value for value in vae.config.latents_std),
        dtype=placement.dtype,
        video=True,
        references=_REFERENCES[inspect(source).flavour],
    )
    settings = {
        "class": type(vae).__name__,
        "dtype": str(placement.dtype),
        "posterior": options.posterior,
    }
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    name = inspect(source).details["pipeline"]
    pipeline = PARTS.text_pipeline(source, placement)
    settings = {
        "class": name,
        "dtype": str(placement.dtype),
        "template": pipeline.prompt_template_encode,
        "dropped tokens": str(pipeline.prompt_template_encode_start_idx),
        "tokenizer": files_digest(source.part("tokenizer")),
        **_PROCESSOR_SETTINGS[name](source, pipeline),
    }
    return PipelineText(
        pipeline,
        encoder_id("text", source, ["text_encoder"], settings),
        _encode,
        device=placement.device,
        reads_images=name != QwenImagePipeline.__name__,
        lengths=_lengths,
    )


def _processor_settings(source: ModelSource, pipeline: Any, pixels: int) -> dict[str, str]:
    processor = pipeline.processor
    return {
        "picture": str(pixels),
        "processor": files_digest(source.part("processor")),
        "processor class": type(processor.image_processor).__name__,  # depends on whether torchvision is installed
    }


_PROCESSOR_SETTINGS: Mapping[str, Callable[[ModelSource, Any], dict[str, str]]] = {
    QwenImagePipeline.__name__: lambda source, pipeline: {"tokens": str(MAX_TOKENS)},
    QwenImageEditPipeline.__name__: lambda source, pipeline: _processor_settings(source, pipeline, EDIT_IMAGE),
    QwenImageEditPlusPipeline.__name__: lambda source, pipeline: _processor_settings(
        source, pipeline, edit_plus.CONDITION_IMAGE_SIZE
    ),
}


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts) -> list[Entry]:
    """Entries without a mask: the batch source builds one if the captions of a batch differ in length, and only then.
    No mask allows faster attention kernels.
    """
    if isinstance(pipeline, QwenImagePipeline):
        return [{"prompt_embeds": embeds} for embeds in _embedded(pipeline, device, prompts, truncated)]
    entries: list[Entry] = []
    for prompt in prompts:  # one by one, because each has its own images
        embeds, _ = pipeline.encode_prompt(prompt=[prompt.text], device=device, **_arguments(pipeline, prompt))
        entries.append({"prompt_embeds": embeds[0]})
    return entries


def _embedded(
    pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts
) -> list[Tensor]:
    """Embeddings [tokens, width] of each caption, equal to the pipeline's `encode_prompt` for that caption alone."""
    dropped = pipeline.prompt_template_encode_start_idx
    tokens = _tokens(pipeline, [prompt.text for prompt in prompts])
    long = (one.text for one, own in zip(prompts, tokens, strict=True) if len(own) - dropped > MAX_TOKENS)
    truncated.add(f"{MAX_TOKENS} tokens", long)

    def encode(ids: Tensor) -> Tensor:
        output = pipeline.text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        states: Tensor = output.hidden_states[-1][:, dropped:][:, :MAX_TOKENS]
        return states.to(pipeline.text_encoder.dtype)

    return encoded_by_length(tokens, encode, device)


def _tokens(pipeline: Any, texts: Sequence[str]) -> list[list[int]]:
    prompts = [pipeline.prompt_template_encode.format(text) for text in texts]
    longest = pipeline.tokenizer_max_length + pipeline.prompt_template_encode_start_idx
    found: list[list[int]] = pipeline.tokenizer(prompts, max_length=longest, truncation=True)["input_ids"]
    return found


def _lengths(pipeline: Any, texts: Sequence[str]) -> list[int]:
    """Token counts. 0 for edit pipelines, whose captions are encoded one by one."""
    if not isinstance(pipeline, QwenImagePipeline):
        return [0] * len(texts)
    return lengths_in_parts(texts, lambda some: _tokens(pipeline, some))


def _arguments(pipeline: Any, prompt: Prompt) -> dict[str, Any]:
    if isinstance(pipeline, QwenImageEditPlusPipeline):
        # The pipeline's template depends on whether it gets a list.
        return {"image": [_condition_image(pipeline, image, _plus_size) for image in prompt.images] or None}
    if len(prompt.images) != 1:
        raise DataError(
            f"caption {prompt.text!r}: {len(prompt.images)} references, but Qwen-Image-Edit supports exactly one: "
            "name one dataset in `conditioning`, or train flavour edit-2509, which supports several"
        )
    return {"image": _condition_image(pipeline, prompt.images[0], _edit_size)}


def _condition_image(pipeline: Any, sample: Sample, size: Callable[[float], tuple[int, int]]) -> Image.Image:
    """A reference as the pipeline's text encoder gets it: resized to a fixed number of pixels."""
    image = to_image(sample)
    width, height = size(image.width / image.height)
    resized: Image.Image = pipeline.image_processor.resize(image, height, width)
    return resized


def _plus_size(ratio: float) -> tuple[int, int]:
    width, height = edit_plus.calculate_dimensions(edit_plus.CONDITION_IMAGE_SIZE, ratio)
    return width, height


def _edit_size(ratio: float) -> tuple[int, int]:
    width, height, _ = edit.calculate_dimensions(EDIT_IMAGE, ratio)
    return width, height
