"""Pictures from FLUX.1's pipelines."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers import FluxKontextPipeline

from gracetune.models.common.packing import PATCH
from gracetune.models.common.sampling import batched, checked_size, need_references, refuse_references
from gracetune.models.spec import Sampled, SampleRequest

_SHORT = 256
"""Caption tokens of weights without a guidance input: schnell."""


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    width, height = checked_size(request, PATCH * pipeline.vae_scale_factor)
    options: dict[str, Any] = {} if request.guidance is None else {"guidance_scale": request.guidance}
    if request.negative_prompt:
        warnings.warn(
            "FLUX.1 is guided by a number it was taught, not by a negative prompt: it is left out", stacklevel=2
        )
    if isinstance(pipeline, FluxKontextPipeline):
        need_references(request, "FLUX.1 Kontext", most=1)
        # It draws as many pixels as `max_area` says, whatever size it is asked for.
        options |= {"image": request.references[0], "max_area": width * height}
    else:
        refuse_references(request, "FLUX.1")
    if not pipeline.transformer.config.guidance_embeds:
        options["max_sequence_length"] = _SHORT
    if request.embeds is None:
        options["prompt"] = request.prompt
    else:
        options |= batched(pipeline, request.embeds)
    drawn = pipeline(
        width=width,
        height=height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        **options,
    )
    return Sampled(frames=tuple(drawn.images))
