"""The inputs and the prediction of SDXL's U-Net, in training and in generated images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gracetune.models.common.pipelines import generate_image
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`, except the sizes in `time_ids`, many of which
    bfloat16 would round."""
    prediction: Tensor = denoiser(
        noisy,
        facts.schedule.model_time(level),
        encoder_hidden_states=batch["prompt_embeds"].to(noisy.dtype),
        added_cond_kwargs={
            "text_embeds": batch["pooled_prompt_embeds"].to(noisy.dtype),
            "time_ids": batch["time_ids"],
        },
        return_dict=False,
    )[0]
    return prediction


# -- generated images --------------------------------------------------------------------------------------------------


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    _check(request, facts.details["side_multiple"])


def _check(request: SampleRequest, multiple: int) -> None:
    reject([*side_problems(*size_of(request), multiple), *reference_problems(request, "SDXL")])


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    """Without a negative prompt the pipeline's configuration decides the unconditional embedding: zeros, for the
    base."""
    _check(request, pipeline.vae_scale_factor)
    options: dict[str, Any] = {} if request.guidance is None else {"guidance_scale": request.guidance}
    options |= _texts(pipeline, request)
    return generate_image(pipeline, request, guidance_rescale=request.guidance_rescale, **options)


def _texts(pipeline: Any, request: SampleRequest) -> dict[str, Any]:
    if request.embeds is None or request.negative_embeds is None:
        return {"prompt": request.prompt, "negative_prompt": request.negative_prompt or None}
    found: dict[str, Any] = batched(pipeline, request.embeds)
    if request.negative_prompt or not pipeline.config.force_zeros_for_empty_prompt:
        negative = batched(pipeline, request.negative_embeds)
        found |= {f"negative_{name}": tensor for name, tensor in negative.items()}
    return found
