"""Loading SDXL from its folder: its noise schedule, its parts, and the pipeline for samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from gracetune.diffusion.schedule import Ddpm
from gracetune.errors import ConfigError, Problem
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
from gracetune.storage.safetensors_headers import open_weights

PIPELINES: Mapping[str, Any] = {StableDiffusionXLPipeline.__name__: StableDiffusionXLPipeline}
UNET = "unet"
_PARTS = {
    UNET: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "text_encoder_2": CONFIG,
    "tokenizer": TOKENIZER,
    "tokenizer_2": TOKENIZER,
    "scheduler": SCHEDULER,
}
_SCHEDULE = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "rescale_betas_zero_snr",
)
_MARKS: Mapping[str, Mapping[str, Any]] = {
    "v_pred": {"prediction_type": "v_prediction"},
    "ztsnr": {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
}
"""Names of empty tensors by which single files declare how they were trained. ComfyUI reads them too."""
_BASE = "use weights derived from SDXL's base model"
_NO_TEXT: Mapping[str, None] = {"text_encoder": None, "text_encoder_2": None}


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of an SDXL folder. ConfigError if it is incomplete or not derived from the base model."""
    pipeline_name(source, "sdxl", PIPELINES)
    require_parts(source, _PARTS)
    scheduler, unet = _scheduler_config(source), part_config(source, UNET, UNet2DConditionModel)
    vae = part_config(source, "vae", AutoencoderKL)
    problems = [*_unknown(source, scheduler, unet, vae)]
    if problems:
        raise ConfigError(problems)
    return ModelFacts(
        family="sdxl",
        flavour="base-1.0",
        experts=(Expert("", UNET),),
        schedule=_schedule(scheduler),
        details={"side_multiple": 2 ** (len(vae["block_out_channels"]) - 1)},
    )


def _scheduler_config(source: ModelSource) -> dict[str, Any]:
    """The folder's scheduler config. For a single file, updated with what the file's marks declare."""
    config = read_config(source, "scheduler", SCHEDULER)
    if source.single_file is not None:
        names = open_weights(source.single_file).entries
        for mark in _MARKS.keys() & names.keys():
            config.update(_MARKS[mark])
    return config


def _unknown(
    source: ModelSource, scheduler: Mapping[str, Any], unet: Mapping[str, Any], vae: Mapping[str, Any]
) -> Iterator[Problem]:
    """Models related to SDXL's base model that are not supported: they would load, and then train incorrectly."""
    file, unet_file = str(source.part("scheduler") / SCHEDULER), str(source.part(UNET) / CONFIG)
    prediction = scheduler.get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction"):
        yield Problem("prediction_type", str(prediction), "epsilon or v_prediction", _BASE, file)
    if scheduler.get("timestep_type", "discrete") != "discrete":
        found = str(scheduler["timestep_type"])
        yield Problem("timestep_type", found, "discrete", _BASE, file)
    if scheduler.get("rescale_betas_zero_snr") and prediction == "epsilon":
        hint = "set prediction_type to v_prediction, if that is what these weights predict"
        found = "epsilon with rescale_betas_zero_snr: pure noise says nothing about the image"
        yield Problem("prediction_type", found, "v_prediction", hint, file)
    if unet["in_channels"] != vae["latent_channels"]:
        found = f"{unet['in_channels']}: an inpainting model or similar"
        yield Problem("in_channels", found, f"{vae['latent_channels']}, the VAE's channels", _BASE, unet_file)


def _schedule(config: Mapping[str, Any]) -> Ddpm:
    """The noise schedule the weights were trained with. The scheduler class in the folder only matters for sampling."""
    trained = DDPMScheduler(**{name: config[name] for name in _SCHEDULE if name in config})
    kept = tuple(float(value) for value in trained.alphas_cumprod.double())
    return Ddpm(kept, config.get("prediction_type", "epsilon"))


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, UNet2DConditionModel, placement)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, UNet2DConditionModel)


def load_vae(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_component(source, "vae", AutoencoderKL, replace(placement, attention=None))


def encoding_dtype(source: ModelSource, placement: PartPlacement) -> torch.dtype:
    """float32 if the VAE's configuration requires it: the published one overflows in half precision."""
    return torch.float32 if part_config(source, "vae", AutoencoderKL)["force_upcast"] else placement.dtype


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement, facts: ModelFacts | None = None,
    *, with_text: bool = True,
) -> Any:  # fmt: skip
    """A denoiser that is not given is loaded. The pipeline itself upcasts a VAE that overflows in float16."""
    texts = text_parts(source, placement) if with_text else _NO_TEXT
    parts = {"vae": load_vae(source, placement), **texts, **denoisers}
    if UNET not in denoisers:
        parts[UNET] = load_denoiser(source, Expert("", UNET), placement)
    pipeline = around(source, parts)
    prediction = (facts or inspect(source)).schedule.prediction
    scheduler = type(pipeline.scheduler)
    pipeline.scheduler = scheduler.from_config({**_scheduler_config(source), "prediction_type": prediction})
    return pipeline


def text_parts(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    return {
        "text_encoder": load_text_model(source, "text_encoder", CLIPTextModel, placement),
        "text_encoder_2": load_text_model(source, "text_encoder_2", CLIPTextModelWithProjection, placement),
    }


def around(source: ModelSource, parts: Mapping[str, Any]) -> Any:
    """diffusers' pipeline of these parts. It reads the missing ones (tokenizers, scheduler) itself."""
    pipeline = assemble(StableDiffusionXLPipeline, source, parts, tokenizers=("tokenizer", "tokenizer_2"))
    pipeline.watermark = None  # it would be embedded in the samples
    return pipeline
