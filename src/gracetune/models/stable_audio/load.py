"""Checking a Stable Audio folder by its configuration files, and loading its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diffusers import StableAudioPipeline
from diffusers.models.autoencoders.autoencoder_oobleck import AutoencoderOobleck
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import nn
from transformers import T5EncoderModel

from gracetune.diffusion.schedule import Cosine
from gracetune.errors import ConfigError, Problem
from gracetune.models.common.pipelines import load_tokenizer
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
from gracetune.models.stable_audio.predict import solver_from

PIPELINE = "StableAudioPipeline"
_MOST_TOKENS = 4096
"""Tokenizers without a limit store 1e30."""
_PARTS = {
    **dict.fromkeys(("transformer", "vae", "text_encoder", "projection_model"), CONFIG),
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a Stable Audio folder. ConfigError if it is incomplete or not supported."""
    pipeline_name(source, "stable_audio", {PIPELINE: None})
    require_parts(source, _PARTS)
    transformer = part_config(source, "transformer", StableAudioDiTModel)
    tokens = read_config(source, "tokenizer", TOKENIZER).get("model_max_length")
    problems = [
        *_other_noise(source, read_config(source, "scheduler", SCHEDULER)),
        *_other_sizes(source, transformer, tokens),
    ]
    if problems:
        raise ConfigError(problems)
    return ModelFacts(
        family="stable_audio",
        flavour="open-1.0",
        experts=(Expert("", "transformer"),),
        schedule=Cosine(),
        details={
            "recognised": f"{PIPELINE}, {transformer['in_channels']} latent channels",
            "text_tokens": tokens,
            "rotary_size": transformer["attention_head_dim"] // 2,
        },
    )


def _other_noise(source: ModelSource, scheduler: Mapping[str, Any]) -> Iterator[Problem]:
    """The cosine schedule assumes data of unit variance and v-prediction. Other weights would train incorrectly."""
    file, hint = str(source.part("scheduler") / SCHEDULER), "use the weights of stable-audio-open-1.0"
    for key, expected in (("prediction_type", "v_prediction"), ("sigma_data", 1.0)):
        if scheduler.get(key) != expected:
            yield Problem(key, repr(scheduler.get(key)), repr(expected), hint, file)


def _other_sizes(source: ModelSource, transformer: Mapping[str, Any], tokens: object) -> Iterator[Problem]:
    if not isinstance(tokens, int) or not 0 < tokens <= _MOST_TOKENS:
        file = str(source.part("tokenizer") / TOKENIZER)
        yield Problem("model_max_length", repr(tokens), "the number of tokens the weights read", "set it to 128", file)
    channels = part_config(source, "vae", AutoencoderOobleck)["decoder_input_channels"]
    if transformer["in_channels"] != channels:
        file = str(source.part("transformer") / CONFIG)
        hint = "check that model.path and model.vae_path belong together"
        yield Problem(
            "in_channels", str(transformer["in_channels"]), f"{channels}, as in the VAE's configuration", hint, file
        )


_PIPELINE: Any = StableAudioPipeline


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, StableAudioDiTModel, placement)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, StableAudioDiTModel)


def load_vae(source: ModelSource, placement: PartPlacement) -> Any:
    return load_component(source, "vae", AutoencoderOobleck, replace(placement, attention=None))


def load_projection(source: ModelSource, placement: PartPlacement) -> Any:
    part = replace(placement, attention=None)
    return load_component(source, "projection_model", StableAudioProjectionModel, part)


def load_t5(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_text_model(source, "text_encoder", T5EncoderModel, placement)


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement, facts: ModelFacts | None = None
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
