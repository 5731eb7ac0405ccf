"""Generating images with FLUX.1's pipelines."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers import FluxKontextPipeline

from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest

_SHORT = 256
"""Caption tokens of schnell, the weights without a guidance input."""


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    edits = facts.details["pipeline"] == FluxKontextPipeline.__name__
    _check(request, facts.details["side_multiple"], edits=edits)


def _check(request: SampleRequest, multiple: int, *, edits: bool) -> None:
    model, references = ("FLUX.1 Kontext", 1) if edits else ("FLUX.1", 0)
    sides = side_problems(*size_of(request), multiple)
    reject([*sides, *reference_problems(request, model, least=references, most=references)])


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    edits = isinstance(pipeline, FluxKontextPipeline)
    _check(request, PATCH * pipeline.vae_scale_factor, edits=edits)
    width, height = size_of(request)
    options: dict[str, Any] = {} if request.guidance is None else {"guidance_scale": request.guidance}
    if request.negative_prompt:
        warnings.warn("negative_prompt: no effect, FLUX.1 does not support negative prompts", stacklevel=2)
    if edits:
        # The pipeline scales the image to `max_area` pixels, whatever size is requested.
        options |= {"image": request.references[0], "max_area": width * height}
    if not pipeline.transformer.config.guidance_embeds:
        options["max_sequence_length"] = _SHORT
    if request.embeds is None:
        options["prompt"] = request.prompt
    else:
        options |= batched(pipeline, request.embeds)
    output = pipeline(
        width=width,
        height=height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        **options,
    )
    return Sampled(frames=tuple(output.images))
