"""Pictures and captions as Qwen-Image's transformer takes them.

In the edit flavours the caption's embedding is made by a vision-language model that sees the references too.
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
from gracetune.models.common.encoding import encoder_id, files_digest
from gracetune.models.common.picture_latents import Codec, PictureLatents, to_image
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.common.tokens import CutTexts
from gracetune.models.qwen_image.load import TRANSFORMER, around, inspect, load_vae, text_parts
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, Placement

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

MAX_TOKENS = 512
"""Of a caption without references: what the pipeline takes if it is not told otherwise. The edit pipelines cut none."""
EDIT_PICTURE = 1024 * 1024
"""Pixels of the one reference as the Edit pipeline shows it to its text encoder: a number inside its call."""
_MEASURED = 1024
"""Captions whose tokens are in memory at a time while they are only counted."""
_REFERENCES = {"t2i": 0, "edit": 1, "edit-2509": None, "edit-2511": None}
"""How many a flavour takes; None: any number."""


def load_latent_encoder(source: ModelSource, placement: Placement, options: EncodeOptions) -> LatentEncoder:
    vae: Any = load_vae(source, placement)
    codec = Codec(
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
    return PictureLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: Placement) -> TextEncoder:
    name = inspect(source).details["pipeline"]
    pipeline = around(source, {**text_parts(source, placement), "vae": None, "scheduler": None, TRANSFORMER: None})
    settings = {
        "class": name,
        "dtype": str(placement.dtype),
        "template": pipeline.prompt_template_encode,
        "dropped tokens": str(pipeline.prompt_template_encode_start_idx),
        "tokenizer": files_digest(source.part("tokenizer")),
        **_PICTURE_SETTINGS[name](source, pipeline),
    }
    return PipelineText(
        pipeline,
        encoder_id("text", source, ["text_encoder"], settings),
        _encode,
        device=placement.device,
        reads_pictures=name != QwenImagePipeline.__name__,
        lengths=_lengths,
    )


def _seen(source: ModelSource, pipeline: Any, pixels: int) -> dict[str, str]:
    processor = pipeline.processor
    return {
        "picture": str(pixels),
        "processor": files_digest(source.part("processor")),
        "processor class": type(processor.image_processor).__name__,  # with torchvision it is another
    }


_PICTURE_SETTINGS: Mapping[str, Callable[[ModelSource, Any], dict[str, str]]] = {
    QwenImagePipeline.__name__: lambda source, pipeline: {"tokens": str(MAX_TOKENS)},
    QwenImageEditPipeline.__name__: lambda source, pipeline: _seen(source, pipeline, EDIT_PICTURE),
    QwenImageEditPlusPipeline.__name__: lambda source, pipeline: _seen(
        source, pipeline, edit_plus.CONDITION_IMAGE_SIZE
    ),
}


def _encode(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], cut: CutTexts) -> list[Entry]:
    """Without a mask: the source of batches makes one where captions of a batch differ in length, and only there it is
    needed. Attention without a mask is the quicker one.
    """
    if isinstance(pipeline, QwenImagePipeline):
        return [{"prompt_embeds": embeds} for embeds in _embedded(pipeline, device, prompts, cut)]
    entries: list[Entry] = []
    for prompt in prompts:  # one after the other: each has pictures of its own
        embeds, _ = pipeline.encode_prompt(prompt=[prompt.text], device=device, **_arguments(pipeline, prompt))
        entries.append({"prompt_embeds": embeds[0]})
    return entries


def _embedded(pipeline: Any, device: torch.device, prompts: Sequence[Prompt], cut: CutTexts) -> list[Tensor]:
    """[tokens, width] for each caption, as the pipeline's `encode_prompt` makes of it alone.

    Only captions of equally many tokens are computed together: beside another of another length a caption would come
    out a little different.
    """
    dropped = pipeline.prompt_template_encode_start_idx
    tokens = _tokens(pipeline, [prompt.text for prompt in prompts])
    alike: dict[int, list[int]] = {}
    for number, (prompt, own) in enumerate(zip(prompts, tokens, strict=True)):
        alike.setdefault(len(own), []).append(number)
        if len(own) - dropped > MAX_TOKENS:
            cut.add(f"{MAX_TOKENS} tokens", [prompt.text])
    found: dict[int, Tensor] = {}
    for numbers in alike.values():
        ids = torch.tensor([tokens[number] for number in numbers], device=device)
        answer = pipeline.text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        states = answer.hidden_states[-1][:, dropped:][:, :MAX_TOKENS].to(pipeline.text_encoder.dtype)
        found |= zip(numbers, states, strict=True)
    return [found[number] for number in range(len(prompts))]


def _tokens(pipeline: Any, texts: Sequence[str]) -> list[list[int]]:
    asked = [pipeline.prompt_template_encode.format(text) for text in texts]
    longest = pipeline.tokenizer_max_length + pipeline.prompt_template_encode_start_idx
    found: list[list[int]] = pipeline.tokenizer(asked, max_length=longest, truncation=True)["input_ids"]
    return found


def _lengths(pipeline: Any, texts: Sequence[str]) -> list[int]:
    """Of an edit pipeline's captions it makes no difference: each is encoded by itself."""
    if not isinstance(pipeline, QwenImagePipeline):
        return [0] * len(texts)
    return [
        len(own)
        for first in range(0, len(texts), _MEASURED)
        for own in _tokens(pipeline, texts[first : first + _MEASURED])
    ]


def _arguments(pipeline: Any, prompt: Prompt) -> dict[str, Any]:
    if isinstance(pipeline, QwenImageEditPlusPipeline):
        # The pipeline words its template by whether it is given a list.
        return {"image": [_shown(pipeline, picture, _plus_size) for picture in prompt.pictures] or None}
    if len(prompt.pictures) != 1:
        raise DataError(
            f"caption {prompt.text!r}: has {len(prompt.pictures)} references, and Qwen-Image-Edit reads exactly one: "
            "name one dataset in `conditioning`, or train flavour edit-2509, which takes several"
        )
    return {"image": _shown(pipeline, prompt.pictures[0], _edit_size)}


def _shown(pipeline: Any, sample: Sample, size: Callable[[float], tuple[int, int]]) -> Image.Image:
    """A reference as the pipeline's text encoder sees it: brought to a certain number of pixels."""
    picture = to_image(sample)
    width, height = size(picture.width / picture.height)
    resized: Image.Image = pipeline.image_processor.resize(picture, height, width)
    return resized


def _plus_size(ratio: float) -> tuple[int, int]:
    width, height = edit_plus.calculate_dimensions(edit_plus.CONDITION_IMAGE_SIZE, ratio)
    return width, height


def _edit_size(ratio: float) -> tuple[int, int]:
    width, height, _ = edit.calculate_dimensions(EDIT_PICTURE, ratio)
    return width, height
