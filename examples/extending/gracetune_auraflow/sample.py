"""Generate images with AuraFlow's pipeline."""

from __future__ import annotations

from typing import Any

import torch

from gracetune.extension import Sampled, SampleRequest, checked_size, reject_references


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    reject_references(request, "AuraFlow")
    width, height = checked_size(request, pipeline.transformer.config.patch_size * pipeline.vae_scale_factor)
    options: dict[str, Any] = {} if request.guidance is None else {"guidance_scale": request.guidance}
    generated = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt or None,
        width=width,
        height=height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        **options,
    )
    return Sampled(frames=tuple(generated.images))
