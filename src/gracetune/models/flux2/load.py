"""Loading FLUX.2 from its folder: its flavour, its parts, and the pipeline for samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import nn
from transformers import Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from gracetune.diffusion.schedule import Flow
from gracetune.models.common.flow_shift import MEGAPIXEL_TOKENS, EmpiricalShift
from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.pipelines import assemble, load_tokenizer
from gracetune.models.flux2.attention import use_contiguous_gradients
from gracetune.models.layout import (
    CONFIG,
    SCHEDULER,
    TOKENIZER,
    part_config,
    pipeline_name,
    read_index,
    require_parts,
)
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement

PIPELINES: Mapping[str, Any] = {pipeline.__name__: pipeline for pipeline in (Flux2Pipeline, Flux2KleinPipeline)}
TRANSFORMER = "transformer"
TRAINING_GUIDANCE = 1.0
"""dev's guidance input during training, unless `objective.guidance` sets another: images of a dataset were generated
without guidance. Also the value of SimpleTuner and ai-toolkit."""
_PARTS = {
    TRANSFORMER: CONFIG,
    "vae": CONFIG,
    "text_encoder": CONFIG,
    "tokenizer": TOKENIZER,
    "scheduler": SCHEDULER,
}
_MOST_DOUBLE_BLOCKS_OF_4B = 5
_NO_TEXT: Mapping[str, None] = {"text_encoder": None}


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a FLUX.2 folder. ConfigError if it is incomplete or of another family."""
    name = pipeline_name(source, "flux2", PIPELINES)
    require_parts(source, _PARTS)
    transformer = part_config(source, TRANSFORMER, Flux2Transformer2DModel)
    halvings = len(part_config(source, "vae", AutoencoderKLFlux2)["block_out_channels"]) - 1
    rule = EmpiricalShift()  # the pipelines compute it themselves, whatever the scheduler's config says
    return ModelFacts(
        family="flux2",
        flavour=_flavour(name, transformer, is_distilled=bool(read_index(source).get("is_distilled", False))),
        experts=(Expert("", TRANSFORMER),),
        schedule=Flow(time_scale=1.0),
        shift=rule.at(MEGAPIXEL_TOKENS),
        details={
            "pipeline": name,
            "side_multiple": PATCH * 2**halvings,
            "guidance": TRAINING_GUIDANCE if transformer["guidance_embeds"] else None,
            "resolution_shift": rule,
        },
    )


def _flavour(pipeline: str, transformer: Mapping[str, Any], *, is_distilled: bool) -> str:
    if pipeline == Flux2Pipeline.__name__:
        return "dev"
    size = "4b" if transformer["num_layers"] <= _MOST_DOUBLE_BLOCKS_OF_4B else "9b"
    return f"klein-{size}" if is_distilled else f"klein-base-{size}"


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, Flux2Transformer2DModel, placement, adjust=use_contiguous_gradients)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, Flux2Transformer2DModel, adjust=use_contiguous_gradients)


def load_vae(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_component(source, "vae", AutoencoderKLFlux2, replace(placement, attention=None))


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement, facts: ModelFacts | None = None,
    *, with_text: bool = True,
) -> Any:  # fmt: skip
    """A denoiser that is not given is loaded."""
    texts = text_parts(source, placement) if with_text else _NO_TEXT
    parts = {"vae": load_vae(source, placement), **texts, **denoisers}
    if TRANSFORMER not in denoisers:
        parts[TRANSFORMER] = load_denoiser(source, Expert("", TRANSFORMER), placement)
    return around(source, parts)


def text_parts(source: ModelSource, placement: PartPlacement) -> dict[str, Any]:
    is_dev = inspect(source).details["pipeline"] == Flux2Pipeline.__name__
    cls: Any = Mistral3ForConditionalGeneration if is_dev else Qwen3ForCausalLM
    return {"text_encoder": load_text_model(source, "text_encoder", cls, placement)}


def around(source: ModelSource, parts: Mapping[str, Any]) -> Any:
    """diffusers' pipeline of these parts. It reads the missing one (scheduler) itself.

    The folders of dev name a processor of images and texts as tokenizer, which needs torchvision. Captions need only
    the tokenizer in it, and diffusers rejects that in the processor's place while it loads.
    """
    cls = PIPELINES[inspect(source).details["pipeline"]]
    pipeline = assemble(cls, source, {**parts, "tokenizer": None}, tokenizers=("tokenizer",))
    pipeline.register_modules(tokenizer=load_tokenizer(source))
    return pipeline
