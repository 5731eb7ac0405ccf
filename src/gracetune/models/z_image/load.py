"""Loading Z-Image from its folder: its flavour, its parts, and the pipeline for samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers import ZImagePipeline
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch import nn
from transformers import Qwen3Model

from gracetune.models.common.flow_shift import read_shift
from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.pipelines import assemble
from gracetune.models.layout import (
    CONFIG,
    SCHEDULER,
    TOKENIZER,
    part_config,
    pipeline_name,
    read_config,
    require_parts,
)
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement
from gracetune.models.z_image.attention import use_pairwise_attention
from gracetune.models.z_image.schedule import FlowFromNoise

PIPELINES: Mapping[str, Any] = {ZImagePipeline.__name__: ZImagePipeline}
BASE, TURBO = "base", "turbo"
TRANSFORMER = "transformer"
_PARTS = {
    TRANSFORMER: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}
_TURBO_SHIFT = 3.0
"""The shift in Turbo's scheduler config. The base has 6, and nothing else in the two folders' configs differs."""
_NO_TEXT: Mapping[str, None] = {"text_encoder": None}


class TurboPipeline(ZImagePipeline):
    """The pipeline of the distilled flavour, which is sampled without guidance."""


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a Z-Image folder. ConfigError if it is incomplete or of another family."""
    pipeline_name(source, "z_image", PIPELINES)
    require_parts(source, _PARTS)
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


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, ZImageTransformer2DModel, placement, adjust=use_pairwise_attention)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, ZImageTransformer2DModel, adjust=use_pairwise_attention)


def load_vae(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_component(source, "vae", AutoencoderKL, replace(placement, attention=None))


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement, facts: ModelFacts | None = None,
    *, with_text: bool = True,
) -> Any:  # fmt: skip
    """A denoiser that is not given is loaded."""
    texts = text_parts(source, placement) if with_text else _NO_TEXT
    parts = {"vae": load_vae(source, placement), **texts, **denoisers}
    if TRANSFORMER not in denoisers:
        parts[TRANSFORMER] = load_denoiser(source, Expert("", TRANSFORMER), placement)
    return around(source, parts, facts)


def text_parts(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    return {"text_encoder": load_text_model(source, "text_encoder", Qwen3Model, placement)}


def around(source: ModelSource, parts: Mapping[str, Any], facts: ModelFacts | None = None) -> Any:
    """diffusers' pipeline of these parts. It reads the missing ones (tokenizer, scheduler) itself."""
    flavour = (facts or inspect(source)).flavour
    return assemble(TurboPipeline if flavour == TURBO else ZImagePipeline, source, parts, tokenizers=("tokenizer",))
