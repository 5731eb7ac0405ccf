"""Wan's parts from their folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn
from transformers import CLIPImageProcessorPil, CLIPVisionModel, UMT5EncoderModel

from gracetune.models.common.gelu import use_sigmoid
from gracetune.models.common.pipelines import assemble
from gracetune.models.layout import read_index
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, Placement
from gracetune.models.wan.attention import turn_by_pairs
from gracetune.models.wan.block import use_fused_blocks
from gracetune.models.wan.facts import FROM_IMAGE, FROM_TEXT, inspect, is_part

PIPELINES: Mapping[str, Any] = {FROM_TEXT: WanPipeline, FROM_IMAGE: WanImageToVideoPipeline}


def with_fewer_passes(denoiser: nn.Module) -> None:
    """What the denoiser computes stays the same; how often it reads and writes its activations does not."""
    turn_by_pairs(denoiser)
    use_fused_blocks(denoiser)
    use_sigmoid(denoiser)


def load_denoiser(source: ModelSource, expert: Expert, placement: Placement) -> nn.Module:
    return load_component(source, expert.component, WanTransformer3DModel, placement, adjust=with_fewer_passes)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, WanTransformer3DModel, adjust=with_fewer_passes)


def load_vae(source: ModelSource, placement: Placement) -> Any:
    """In float32 whatever the placement's dtype: so it is published, and so the memory plan counts it."""
    return load_component(source, "vae", AutoencoderKLWan, replace(placement, dtype=torch.float32, attention=None))


def load_image_encoder(source: ModelSource, placement: Placement) -> nn.Module:
    return load_text_model(source, "image_encoder", CLIPVisionModel, placement)


def load_image_processor(source: ModelSource) -> CLIPImageProcessorPil:
    """Pillow's: torchvision's scales a little differently, and is not everywhere."""
    return CLIPImageProcessorPil.from_pretrained(str(source.part("image_processor")), local_files_only=True)


def load_umt5(source: ModelSource, placement: Placement) -> nn.Module:
    return load_text_model(source, "text_encoder", UMT5EncoderModel, placement)


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: Placement, facts: ModelFacts | None = None,
    *, with_text: bool = True,
) -> Any:  # fmt: skip
    """A WanPipeline or WanImageToVideoPipeline, as the folder says; an expert that is not given is loaded."""
    index, facts = read_index(source), facts or inspect(source)
    parts: dict[str, Any] = {
        expert.component: denoisers[expert.component]
        if expert.component in denoisers
        else load_denoiser(source, expert, placement)
        for expert in facts.experts
    }
    parts.setdefault("transformer_2", None)
    parts["vae"] = load_vae(source, placement)
    parts["text_encoder"] = load_umt5(source, placement) if with_text else None
    if is_part(index, "image_encoder"):
        parts["image_encoder"] = load_image_encoder(source, placement)
        parts["image_processor"] = load_image_processor(source)
    if len(facts.experts) > 1:
        parts["boundary_ratio"] = facts.experts[0].lowest
    return assemble(PIPELINES[index["_class_name"]], source, parts, tokenizers=("tokenizer",))
