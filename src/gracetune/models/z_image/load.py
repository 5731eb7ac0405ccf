"""Loading Z-Image from its folder: its flavour, its parts, and the pipeline for samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import ZImagePipeline
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from transformers import Qwen3Model

from gracetune.models.common.flow_shift import read_shift
from gracetune.models.common.latent_packing import PATCH
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
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement
from gracetune.models.z_image.attention import use_pairwise_attention
from gracetune.models.z_image.schedule import FlowFromNoise

PIPELINES: Mapping[str, Any] = {ZImagePipeline.__name__: ZImagePipeline}
BASE, TURBO = "base", "turbo"
_FILES = {
    TRANSFORMER: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}
_TURBO_SHIFT = 3.0
"""The shift in Turbo's scheduler config. The base has 6, and nothing else in the two folders' configs differs."""


class TurboPipeline(ZImagePipeline):
    """Marks the pipeline of the distilled flavour: `sample` uses no guidance with it unless the request sets some."""


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a Z-Image folder. ConfigError if it is incomplete or of another family.

    `model.flavour` of the config replaces this flavour (`fact_overrides`).
    """
    pipeline_name(source, "z_image", PIPELINES)
    require_parts(source, _FILES)
    part_config(source, TRANSFORMER, ZImageTransformer2DModel)
    shift, rule = read_shift(read_config(source, "scheduler", SCHEDULER))
    halvings = len(part_config(source, "vae", AutoencoderKL)["block_out_channels"]) - 1
    return ModelFacts(
        family="z_image",
        flavour=TURBO if rule is None and shift == _TURBO_SHIFT else BASE,
        experts=(Expert("", TRANSFORMER),),
        schedule=FlowFromNoise(),
        shift=shift,
        details={"resolution_shift": rule, "side_multiple": PATCH * 2**halvings},
    )


def _load_texts(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    return {"text_encoder": load_text_model(source, "text_encoder", Qwen3Model, placement)}


def _pipeline(source: ModelSource, facts: ModelFacts | None) -> Any:
    return TurboPipeline if (facts or inspect(source)).flavour == TURBO else ZImagePipeline


PARTS = TransformerParts(
    ZImageTransformer2DModel,
    AutoencoderKL,
    pipeline=_pipeline,
    load_texts=_load_texts,
    adjust=use_pairwise_attention,
)
