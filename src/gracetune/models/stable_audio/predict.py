"""The inputs and the prediction of Stable Audio's denoiser, in training and in generated audio.

B samples, C latent channels, L latent columns (positions in time), T tokens of the longest caption, D the width of the
conditioning. Everything is in the dtype of `noisy`: the caller chooses the compute dtype.

The published folder names `CosineDPMSolverMultistepScheduler`, a stochastic solver that needs torchsde. `CosineSolver`
has the same noise levels, input and output scaling and model time, but follows the deterministic path (second-order
DPM-Solver++) and needs no further package. It is diffusers' `EDMDPMSolverMultistepScheduler` with another model time:
that class passes log(sigma) / 4, which these weights were not trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import EDMDPMSolverMultistepScheduler
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn

from gracetune.errors import ConfigError, Problem
from gracetune.models.common.sample_checks import reject_references
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """The predicted v, [B, C, L]. Padding in `prompt_embeds` [B, T, D] must be zeros, as in pretraining."""
    text, seconds = batch["prompt_embeds"].to(noisy), batch["seconds_embeds"].to(noisy)
    prediction: Tensor = denoiser(
        noisy,
        facts.schedule.model_time(level),
        encoder_hidden_states=_conditioning(text, seconds, facts.details["text_tokens"]),
        global_hidden_states=seconds.flatten(1)[:, None],
        rotary_embedding=_rotary(noisy, facts.details["rotary_size"]),
        return_dict=False,
    )[0]
    return prediction


def _conditioning(text: Tensor, seconds: Tensor, tokens: int) -> Tensor:
    """[B, tokens + 2, D]. Without a caption (all zeros) the seconds are zeros here too, as in the pipeline's
    guidance."""
    captioned = text.ne(0).flatten(1).any(dim=1)
    text = F.pad(text, (0, 0, 0, tokens - text.shape[1]))
    return torch.cat([text, seconds * captioned[:, None, None]], dim=1)


def _rotary(noisy: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tables for the global state in front and every column. On the device, or each block would copy them there."""
    positions: Any = torch.arange(1 + noisy.shape[2], device=noisy.device)  # a tensor works, but is not annotated
    cos, sin = get_1d_rotary_pos_embed(size, positions, use_real=True, repeat_interleave_real=False)
    return cos, sin


# -- the solver that generates samples ---------------------------------------------------------------------------------


_SHARED = (
    "sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "num_train_timesteps", "prediction_type", "rho",
    "solver_order", "solver_type", "lower_order_final", "euler_at_final", "final_sigmas_type",
)  # fmt: skip
"""Settings that both schedulers have, with the same meaning."""


class CosineSolver(EDMDPMSolverMultistepScheduler):
    def precondition_noise(self, sigma: float | Tensor) -> Tensor:
        """The time the denoiser gets: the level of `diffusion.schedule.Cosine`, where sigma is tan(pi level / 2)."""
        return torch.as_tensor(sigma).atan() / (math.pi / 2)


def solver_from(config: Mapping[str, Any]) -> CosineSolver:
    """`config` is the folder's scheduler_config.json, of either class."""
    scheduler_class: type[Any] = CosineSolver  # diffusers' constructors are not typed
    solver: CosineSolver = scheduler_class(**{key: config[key] for key in _SHARED if key in config})
    return solver


# -- generated audio ---------------------------------------------------------------------------------------------------


_GUIDANCE = 7.0


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    """Only references are checked: no config sets `seconds`, and only `sample` knows their maximum."""
    reject_references(request, "Stable Audio")


@torch.no_grad()
def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    """Audio of `request.seconds`. 0 means the longest audio that the weights support."""
    reject_references(request, "Stable Audio")
    rate = int(pipeline.vae.config.sampling_rate)
    longest = pipeline.transformer.config.sample_size * pipeline.vae.hop_length / rate
    if not 0 <= request.seconds <= longest:
        expected = f"from 0 to {longest:.1f}, the longest these weights support"
        raise ConfigError([Problem("seconds", f"{request.seconds:g}", expected, f"{longest:.1f}")])
    pipeline.set_progress_bar_config(disable=True)
    sounds = pipeline(
        prompt=request.prompt,
        # None instead of an empty text: without a negative prompt the pipeline uses zeros, as in pretraining.
        negative_prompt=request.negative_prompt or None,
        audio_end_in_s=request.seconds or longest,
        num_inference_steps=request.steps,
        guidance_scale=_GUIDANCE if request.guidance is None else request.guidance,
        generator=torch.Generator().manual_seed(request.seed),
    ).audios
    return Sampled(audio=sounds[0].float().cpu(), sample_rate=rate)
