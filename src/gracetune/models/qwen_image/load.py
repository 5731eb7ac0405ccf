"""Checking a Qwen-Image folder by its configuration files, and loading its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration, Qwen2VLProcessor

from gracetune.diffusion.schedule import Flow
from gracetune.models.common.flow_shift import read_shift
from gracetune.models.common.gelu import use_sigmoid
from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.pipelines import load_tokenizer
from gracetune.models.common.transformer_parts import TRANSFORMER, TransformerParts
from gracetune.models.layout import (
    CONFIG,
    SCHEDULER,
    TOKENIZER,
    part_config,
    pipeline_name,
    read_config,
    require_parts,
)
from gracetune.models.loading import load_text_model
from gracetune.models.qwen_image.attention import use_pairwise_attention
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement


class ImageProcessor(Qwen2VLProcessor):
    """Reads the folder of a `Qwen2VLProcessor`, and replaces it in diffusers' pipelines."""

    # transformers derives a processor's parts from the names of these parameters.
    def __init__(
        self, image_processor: Any = None, tokenizer: PreTrainedTokenizerFast | None = None, **others: Any
    ) -> None:
        initialize: Any = super().__init__  # transformers does not annotate it
        initialize(image_processor, tokenizer, chat_template=others.get("chat_template"))


PIPELINES: Mapping[str, Any] = {
    pipeline.__name__: pipeline for pipeline in (QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline)
}
_FILES = {
    TRANSFORMER: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}
_PROCESSOR = {"processor": TOKENIZER}
_NO_GRADIENT = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
"""Layers without a gradient in the last block. They only compute the caption stream, which nothing reads after it."""


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a Qwen-Image folder. ConfigError if it is incomplete or of another family."""
    name = pipeline_name(source, "qwen_image", PIPELINES)
    require_parts(source, _FILES if name == QwenImagePipeline.__name__ else {**_FILES, **_PROCESSOR})
    transformer = part_config(source, TRANSFORMER, QwenImageTransformer2DModel)
    vae = part_config(source, "vae", AutoencoderKLQwenImage)
    scheduler = read_config(source, "scheduler", SCHEDULER)
    shift, rule = read_shift(scheduler)
    last = transformer["num_layers"] - 1
    return ModelFacts(
        family="qwen_image",
        flavour=_flavour(name, transformer),
        experts=(Expert("", TRANSFORMER),),
        schedule=Flow(time_scale=1.0),
        shift=shift,
        details={
            "pipeline": name,
            "resolution_shift": rule,
            "side_multiple": PATCH * 2 ** len(vae["temperal_downsample"]),
            "stretched_schedule": bool(scheduler.get("shift_terminal")),
        },
        untrained=tuple(f"transformer_blocks.{last}.{layer}" for layer in _NO_GRADIENT),
    )


def _flavour(pipeline: str, transformer: Mapping[str, Any]) -> str:
    """Weights that differ only in their values (t2i and t2i-2512) cannot be told apart; the older name is used."""
    if pipeline == QwenImagePipeline.__name__:
        return "t2i"
    if pipeline == QwenImageEditPipeline.__name__:
        return "edit"
    return "edit-2511" if transformer["zero_cond_t"] else "edit-2509"


def use_fused_operations(denoiser: nn.Module) -> None:
    """Make the denoiser compute the same with fewer reads and writes of its activations."""
    use_pairwise_attention(denoiser)
    use_sigmoid(denoiser)


def _load_texts(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "text_encoder": load_text_model(source, "text_encoder", Qwen2_5_VLForConditionalGeneration, placement)
    }
    if inspect(source).details["pipeline"] != QwenImagePipeline.__name__:
        parts["processor"] = load_tokenizer(source, "processor", ImageProcessor)
    return parts


PARTS = TransformerParts(
    QwenImageTransformer2DModel,
    AutoencoderKLQwenImage,
    pipeline=lambda source, facts: PIPELINES[inspect(source).details["pipeline"]],
    load_texts=_load_texts,
    adjust=use_fused_operations,
)
