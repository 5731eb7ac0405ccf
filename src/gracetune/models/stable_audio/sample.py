"""Generating audio with diffusers' own pipeline."""

from __future__ import annotations

from typing import Any

import torch

from gracetune.errors import ConfigError, Problem
from gracetune.models.common.sample_checks import reject_references
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest

_GUIDANCE = 7.0


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    """Does not check seconds, which no config sets. `sample` does, because it knows the maximum."""
    reject_references(request, "Stable Audio")


@torch.no_grad()
def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    """Audio of the requested length; without one, the longest the weights support."""
    reject_references(request, "Stable Audio")
    rate = int(pipeline.vae.config.sampling_rate)
    longest = pipeline.transformer.config.sample_size * pipeline.vae.hop_length / rate
    if not 0 <= request.seconds <= longest:
        expected = f"from 0 to {longest:.1f}, the longest these weights support"
        raise ConfigError([Problem("seconds", f"{request.seconds:g}", expected, f"{longest:.1f}")])
    pipeline.set_progress_bar_config(disable=True)
    sounds = pipeline(
        prompt=request.prompt,
        # None instead of an empty text: the weights know the absence of a negative prompt as zeros.
        negative_prompt=request.negative_prompt or None,
        audio_end_in_s=request.seconds or longest,
        num_inference_steps=request.steps,
        guidance_scale=_GUIDANCE if request.guidance is None else request.guidance,
        generator=torch.Generator().manual_seed(request.seed),
    ).audios
    return Sampled(audio=sounds[0].float().cpu(), sample_rate=rate)
