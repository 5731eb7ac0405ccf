"""AuraFlow's parts from their folder: what its files say, the transformer, and the pipeline it is sampled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers import AuraFlowPipeline
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel
from torch import nn
from transformers import UMT5EncoderModel

from gracetune.extension import (
    CONFIG_FILE,
    SCHEDULER,
    TOKENIZER,
    Expert,
    Flow,
    ModelFacts,
    ModelSource,
    PartPlacement,
    assemble_pipeline,
    build_component,
    load_component,
    load_text_model,
    part_config,
    pipeline_name,
    read_config,
    read_shift,
    require_parts,
)
from gracetune_auraflow import FAMILY

TRANSFORMER = "transformer"
_PIPELINES: Mapping[str, Any] = {AuraFlowPipeline.__name__: AuraFlowPipeline}
_PARTS = {
    TRANSFORMER: CONFIG_FILE,
    "vae": CONFIG_FILE,
    "text_encoder": CONFIG_FILE,
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}


def inspect(source: ModelSource) -> ModelFacts:
    """Reject a folder of another family, or one that lacks a part, before any weight is read."""
    pipeline_name(source, FAMILY, _PIPELINES)
    require_parts(source, _PARTS)
    shift, _ = read_shift(read_config(source, "scheduler", SCHEDULER))
    return ModelFacts(
        family=FAMILY,
        flavour="v0.3",
        experts=(Expert("", TRANSFORMER),),
        schedule=Flow(time_scale=1.0),
        shift=shift,
    )


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, AuraFlowTransformer2DModel, placement)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, AuraFlowTransformer2DModel)


def load_vae(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_component(source, "vae", AutoencoderKL, replace(placement, attention=None))


def encoding_dtype(source: ModelSource, placement: PartPlacement) -> torch.dtype:
    """float32 where the VAE's configuration asks for that: the published one overflows in half precision."""
    return torch.float32 if part_config(source, "vae", AutoencoderKL)["force_upcast"] else placement.dtype


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement, facts: ModelFacts | None = None
) -> Any:
    parts = {"vae": load_vae(source, placement), **text_part(source, placement), **denoisers}
    if TRANSFORMER not in denoisers:
        parts[TRANSFORMER] = load_denoiser(source, Expert("", TRANSFORMER), placement)
    return around(source, parts)


def text_part(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    return {"text_encoder": load_text_model(source, "text_encoder", UMT5EncoderModel, placement)}


def around(source: ModelSource, parts: Mapping[str, Any]) -> Any:
    """diffusers' pipeline of these parts; it reads what is not among them (tokenizer, scheduler) itself."""
    return assemble_pipeline(AuraFlowPipeline, source, parts, tokenizers=("tokenizer",))
