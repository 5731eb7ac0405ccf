"""Pictures from Qwen-Image's pipelines."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImageEditPlusPipeline, QwenImagePipeline

from gracetune.errors import ConfigError, Problem
from gracetune.models.common.packing import PATCH
from gracetune.models.common.sampling import batched, checked_size, need_references, refuse_references
from gracetune.models.spec import Sampled, SampleRequest

NO_WISH = " "
"""Guidance compares with the embedding of a negative prompt; this is the one the weights' authors use for none."""

_FEWEST_STEPS = 2


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    options: dict[str, Any] = {} if request.guidance is None else {"true_cfg_scale": request.guidance}
    width, height = checked_size(request, PATCH * pipeline.vae_scale_factor)
    _check_steps(pipeline, request)
    if isinstance(pipeline, QwenImagePipeline):
        refuse_references(request, "Qwen-Image")
    elif isinstance(pipeline, QwenImageEditPlusPipeline):
        need_references(request, "Qwen-Image-Edit-Plus", most=None)
        options["image"] = list(request.references)
    else:
        need_references(request, "Qwen-Image-Edit", most=1)
        options["image"] = request.references[0]
    options |= _texts(pipeline, request)
    drawn = pipeline(
        width=width,
        height=height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        **options,
    )
    return Sampled(frames=tuple(drawn.images))


def _texts(pipeline: Any, request: SampleRequest) -> dict[str, Any]:
    if request.embeds is None or request.negative_embeds is None:
        return {"prompt": request.prompt, "negative_prompt": request.negative_prompt or NO_WISH}
    found: dict[str, Any] = {}
    for prefix, entry in (("", request.embeds), ("negative_", request.negative_embeds)):
        embeds = batched(pipeline, entry)["prompt_embeds"]
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        found |= {f"{prefix}prompt_embeds": embeds, f"{prefix}prompt_embeds_mask": mask}
    return found


def _check_steps(pipeline: Any, request: SampleRequest) -> None:
    """The schedule is stretched so that its last step ends at a set level: with one step that is a division by zero."""
    if request.steps < _FEWEST_STEPS and pipeline.scheduler.config.shift_terminal:
        expected = f"{_FEWEST_STEPS} or more: of one step this model's schedule makes no numbers"
        hint = f"ask for {_FEWEST_STEPS} steps; Qwen-Image itself is sampled with 50"
        raise ConfigError([Problem("the sample's steps", str(request.steps), expected, hint)])
