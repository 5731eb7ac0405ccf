"""Checking a Krea 2 folder by its configuration files, and loading its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers import Krea2Pipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from torch import nn
from transformers import Qwen3VLModel

from gracetune.diffusion.schedule import Flow
from gracetune.models.common.flow_shift import read_shift
from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.pipelines import assemble
from gracetune.models.krea2.attention import use_pairwise_attention
from gracetune.models.layout import (
    CONFIG,
    SCHEDULER,
    TOKENIZER,
    part_config,
    pipeline_name,
    read_config,
    read_index,
    require_parts,
)
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement

PIPELINES: Mapping[str, Any] = {Krea2Pipeline.__name__: Krea2Pipeline}
RAW, TURBO = "raw", "turbo"
TRANSFORMER = "transformer"
IS_DISTILLED = "is_distilled"
"""The entry of model_index.json that only Turbo has. The other files of both folders are the same."""
_PARTS = {
    TRANSFORMER: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}
_TURBO_SHIFT = math.exp(1.15)
"""diffusers' pipeline samples distilled weights with this shift, whatever the size of the image."""
_NO_TEXT: Mapping[str, None] = {"text_encoder": None}


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a Krea 2 folder. ConfigError if it is incomplete or of another family."""
    pipeline_name(source, "krea2", PIPELINES)
    require_parts(source, _PARTS)
    part_config(source, TRANSFORMER, Krea2Transformer2DModel)
    distilled = bool(read_index(source).get(IS_DISTILLED, False))
    shift, rule = read_shift(read_config(source, "scheduler", SCHEDULER))
    halvings = len(part_config(source, "vae", AutoencoderKLQwenImage)["temperal_downsample"])
    return ModelFacts(
        family="krea2",
        flavour=TURBO if distilled else RAW,
        experts=(Expert("", TRANSFORMER),),
        schedule=Flow(time_scale=1.0),
        shift=_TURBO_SHIFT if distilled else shift,
        details={"resolution_shift": None if distilled else rule, "side_multiple": PATCH * 2**halvings},
    )


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, Krea2Transformer2DModel, placement, adjust=use_pairwise_attention)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, Krea2Transformer2DModel, adjust=use_pairwise_attention)


def load_vae(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_component(source, "vae", AutoencoderKLQwenImage, replace(placement, attention=None))


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
    return {"text_encoder": load_text_model(source, "text_encoder", Qwen3VLModel, placement)}


def around(source: ModelSource, parts: Mapping[str, Any], facts: ModelFacts | None = None) -> Any:
    """diffusers' pipeline of these parts. It reads the missing ones (tokenizer, scheduler) itself."""
    given = {**parts, IS_DISTILLED: (facts or inspect(source)).flavour == TURBO}
    return assemble(Krea2Pipeline, source, given, tokenizers=("tokenizer",))
