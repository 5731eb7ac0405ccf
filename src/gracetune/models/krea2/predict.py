"""The inputs and the prediction of Krea 2's transformer, in training and in generated images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import Krea2Pipeline
from torch import Tensor, nn

from gracetune.models.common.latent_packing import PATCH, pack, unpack
from gracetune.models.common.pipelines import generate_image, guidance_from_zero
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`.

    A batch without `prompt_attention_mask` has captions of one length. The caption's tokens have no positions.
    """
    embeds = batch["prompt_embeds"].to(noisy.dtype)  # [B, tokens, layers of the text encoder, width]
    height, width = noisy.shape[-2:]
    prediction: Tensor = denoiser(
        hidden_states=pack(noisy),
        encoder_hidden_states=embeds,
        timestep=facts.schedule.model_time(level),
        position_ids=Krea2Pipeline.prepare_position_ids(embeds.shape[1], height // PATCH, width // PATCH, noisy.device),
        encoder_attention_mask=batch.get("prompt_attention_mask"),
        return_dict=False,
    )[0]
    return unpack(prediction, height, width)


# -- generated images --------------------------------------------------------------------------------------------------


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    _check(request, facts.details["side_multiple"])


def _check(request: SampleRequest, multiple: int) -> None:
    reject([*side_problems(*size_of(request), multiple), *reference_problems(request, "Krea 2")])


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    _check(request, PATCH * pipeline.vae_scale_factor)
    guidance = guidance_from_zero(request, distilled=pipeline.config.is_distilled)
    return generate_image(pipeline, request, **_texts(pipeline, request), **guidance)


def _texts(pipeline: Any, request: SampleRequest) -> dict[str, Any]:
    if request.embeds is None or request.negative_embeds is None:
        return {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
    entries = [batched(pipeline, entry)["prompt_embeds"] for entry in (request.embeds, request.negative_embeds)]
    longest = max(entry.shape[1] for entry in entries)  # the pipeline has positions for one length only
    found: dict[str, Any] = {}
    for prefix, entry in zip(("", "negative_"), entries, strict=True):
        padding = longest - entry.shape[1]
        mask = torch.ones(entry.shape[:2], dtype=torch.bool, device=entry.device)
        found[f"{prefix}prompt_embeds"] = F.pad(entry, (0, 0, 0, 0, 0, padding))
        found[f"{prefix}prompt_embeds_mask"] = F.pad(mask, (0, padding))
    return found
