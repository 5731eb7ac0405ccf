"""Loading FLUX.1 from its folder: its flavour, its parts, and the pipeline for samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import FluxKontextPipeline, FluxPipeline
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from gracetune.diffusion.schedule import Flow
from gracetune.models.common.flow_shift import read_shift
from gracetune.models.common.gelu import use_sigmoid
from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.transformer_parts import TRANSFORMER, TransformerParts
from gracetune.models.flux.attention import use_own_processors
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

PIPELINES: Mapping[str, Any] = {pipeline.__name__: pipeline for pipeline in (FluxPipeline, FluxKontextPipeline)}
TRAINING_GUIDANCE = 1.0
"""The guidance input during training, unless `objective.guidance` sets another: images of a dataset were generated
without guidance. Also the default of SimpleTuner and ai-toolkit."""
_FILES = {
    TRANSFORMER: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "text_encoder_2": CONFIG,
    "tokenizer": TOKENIZER,
    "tokenizer_2": TOKENIZER,
    "scheduler": SCHEDULER,
}
_TOKENS = {"schnell": 256}
"""Caption tokens of flavours that read fewer than `_MOST_TOKENS`."""
_MOST_TOKENS = 512


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a FLUX.1 folder. ConfigError if it is incomplete or of another family."""
    name = pipeline_name(source, "flux", PIPELINES)
    require_parts(source, _FILES)
    guided = bool(part_config(source, TRANSFORMER, FluxTransformer2DModel)["guidance_embeds"])
    shift, rule = read_shift(read_config(source, "scheduler", SCHEDULER))
    flavour = _flavour(name, guided=guided)
    halvings = len(part_config(source, "vae", AutoencoderKL)["block_out_channels"]) - 1
    return ModelFacts(
        family="flux",
        flavour=flavour,
        experts=(Expert("", TRANSFORMER),),
        schedule=Flow(time_scale=1.0),
        shift=shift,
        details={
            "pipeline": name,
            "side_multiple": PATCH * 2**halvings,
            "guidance": TRAINING_GUIDANCE if guided else None,
            "caption_tokens": _TOKENS.get(flavour, _MOST_TOKENS),
            "resolution_shift": rule,
        },
    )


def _flavour(pipeline: str, *, guided: bool) -> str:
    """Weights that differ only in their values (dev and krea) cannot be told apart; the older name is used."""
    if pipeline == FluxKontextPipeline.__name__:
        return "kontext"
    return "dev" if guided else "schnell"


def use_fused_operations(denoiser: nn.Module) -> None:
    """Replace attention and GELU by our implementations, which compute the same."""
    use_own_processors(denoiser)
    use_sigmoid(denoiser)


def _load_texts(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    return {
        "text_encoder": load_text_model(source, "text_encoder", CLIPTextModel, placement),
        "text_encoder_2": load_text_model(source, "text_encoder_2", T5EncoderModel, placement),
    }


PARTS = TransformerParts(
    FluxTransformer2DModel,
    AutoencoderKL,
    pipeline=lambda source, facts: PIPELINES[inspect(source).details["pipeline"]],
    load_texts=_load_texts,
    text_encoders=("text_encoder", "text_encoder_2"),
    tokenizers=("tokenizer", "tokenizer_2"),
    adjust=use_fused_operations,
)
