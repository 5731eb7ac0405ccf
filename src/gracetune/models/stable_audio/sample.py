"""Sound drawn by diffusers' own pipeline."""

from __future__ import annotations

from typing import Any

import torch

from gracetune.errors import ConfigError, Problem
from gracetune.models.common.sampling import refuse_references
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest

_GUIDANCE = 7.0


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    """Seconds are left to `sample`, which knows the longest: no config asks for any."""
    refuse_references(request, "Stable Audio")


@torch.no_grad()
def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    """The asked-for seconds; without any the longest the weights know."""
    refuse_references(request, "Stable Audio")
    rate = int(pipeline.vae.config.sampling_rate)
    longest = pipeline.transformer.config.sample_size * pipeline.vae.hop_length / rate
    if not 0 <= request.seconds <= longest:
        expected = f"at most {longest:.1f}, the longest these weights make"
        raise ConfigError([Problem("seconds", f"{request.seconds:g}", expected, f"{longest:.1f}")])
    pipeline.set_progress_bar_config(disable=True)
    sounds = pipeline(
        prompt=request.prompt,
        # Nothing to avoid is not an empty caption: the weights know it as zeros.
        negative_prompt=request.negative_prompt or None,
        audio_end_in_s=request.seconds or longest,
        num_inference_steps=request.steps,
        guidance_scale=_GUIDANCE if request.guidance is None else request.guidance,
        generator=torch.Generator().manual_seed(request.seed),
    ).audios
    return Sampled(audio=sounds[0].float().cpu(), sample_rate=rate)
