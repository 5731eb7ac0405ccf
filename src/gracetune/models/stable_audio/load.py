"""Stable Audio's parts from their folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers import StableAudioPipeline
from diffusers.models.autoencoders.autoencoder_oobleck import AutoencoderOobleck
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import nn
from transformers import T5EncoderModel

from gracetune.models.common.pipelines import load_tokenizer
from gracetune.models.layout import SCHEDULER, read_config
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, Placement
from gracetune.models.stable_audio.facts import inspect
from gracetune.models.stable_audio.solver import solver_from

_PIPELINE: Any = StableAudioPipeline


def load_denoiser(source: ModelSource, expert: Expert, placement: Placement) -> nn.Module:
    return load_component(source, expert.component, StableAudioDiTModel, placement)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, StableAudioDiTModel)


def load_vae(source: ModelSource, placement: Placement) -> Any:
    return load_component(source, "vae", AutoencoderOobleck, replace(placement, attention=None))


def load_projection(source: ModelSource, placement: Placement) -> Any:
    part = replace(placement, attention=None)
    return load_component(source, "projection_model", StableAudioProjectionModel, part)


def load_t5(source: ModelSource, placement: Placement) -> nn.Module:
    return load_text_model(source, "text_encoder", T5EncoderModel, placement)


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: Placement, facts: ModelFacts | None = None
) -> Any:
    (expert,) = inspect(source).experts
    given = expert.component in denoisers
    return _PIPELINE(
        vae=load_vae(source, placement),
        text_encoder=load_t5(source, placement),
        projection_model=load_projection(source, placement),
        tokenizer=load_tokenizer(source),
        transformer=denoisers[expert.component] if given else load_denoiser(source, expert, placement),
        scheduler=solver_from(read_config(source, "scheduler", SCHEDULER)),
    )
