"""The inputs and the prediction of FLUX.2's transformer, in training and in generated images."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import Flux2Pipeline
from torch import Tensor, nn

from gracetune.errors import Problem
from gracetune.models.common.latent_packing import PATCH, pack, references_of, unpack
from gracetune.models.common.pipelines import UNGUIDED, generate_image
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest

_REFERENCE_STEP = 10
"""References are this far from one another, and from the image, along the first axis of positions."""


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`.

    Reference tokens follow the image's, in planes of their own. What the model predicts for them is discarded.
    """
    images = [noisy, *references_of(batch)]
    tokens = [pack(image.to(noisy.dtype)) for image in images]
    caption, guidance = batch["prompt_embeds"].to(noisy.dtype), facts.details["guidance"]
    prediction: Tensor = denoiser(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=facts.schedule.model_time(level),
        guidance=None if guidance is None else torch.full_like(level, guidance, dtype=torch.float32),
        encoder_hidden_states=caption,
        txt_ids=_caption_positions(caption),
        img_ids=torch.cat([_positions(image, plane * _REFERENCE_STEP) for plane, image in enumerate(images)]),
        return_dict=False,
    )[0]
    height, width = noisy.shape[-2:]
    return unpack(prediction[:, : tokens[0].shape[1]], height, width)


def _positions(latents: Tensor, plane: int) -> Tensor:
    """[tokens, 4]: plane, row and column of each token, and 0, for RoPE."""
    rows, columns = (torch.arange(side // PATCH, device=latents.device) for side in latents.shape[-2:])
    one, zero = (torch.full((1,), value, device=latents.device) for value in (plane, 0))
    return torch.cartesian_prod(one, rows, columns, zero).float()


def _caption_positions(caption: Tensor) -> Tensor:
    """[tokens, 4]: the number of each token along the last axis."""
    numbers = torch.arange(caption.shape[1], device=caption.device).float()
    return torch.nn.functional.pad(numbers[:, None], (3, 0))


# -- generated images --------------------------------------------------------------------------------------------------


_LEAST_SIDE, _MOST_STRETCHED = 64, 8
"""The pipelines reject a reference with a shorter side, or with a higher ratio of its sides."""


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    _check(request, facts.details["side_multiple"])


def _check(request: SampleRequest, multiple: int) -> None:
    references = reference_problems(request, "FLUX.2", most=None)
    reject([*side_problems(*size_of(request), multiple), *references, *_reference_sizes(request)])


def _reference_sizes(request: SampleRequest) -> Iterator[Problem]:
    for image in request.references:
        short, long = sorted(image.size)
        if short < _LEAST_SIDE or long > _MOST_STRETCHED * short:
            expected = f"sides of at least {_LEAST_SIDE} pixels, one at most {_MOST_STRETCHED} times the other"
            hint = "give a larger image, or crop it"
            yield Problem("references", f"an image of {image.width}x{image.height} pixels", expected, hint)


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    _check(request, PATCH * pipeline.vae_scale_factor)
    options: dict[str, Any] = {} if request.guidance is None else {"guidance_scale": request.guidance}
    if request.references:
        options["image"] = [*request.references]
    return generate_image(pipeline, request, **_texts(pipeline, request), **options)


def _texts(pipeline: Any, request: SampleRequest) -> dict[str, Any]:
    """klein's base weights are guided away from a negative prompt, the others read their prompt once."""
    given: dict[str, Any] = {"prompt": request.prompt} if request.embeds is None else batched(pipeline, request.embeds)
    if isinstance(pipeline, Flux2Pipeline) or pipeline.config.is_distilled:
        if request.negative_prompt:
            warnings.warn("negative_prompt: no effect, these weights do not support negative prompts", stacklevel=3)
        return given
    if request.guidance is not None and request.guidance <= UNGUIDED:
        if request.negative_prompt:
            warnings.warn(f"negative_prompt: no effect with guidance {request.guidance:g}", stacklevel=3)
        return given
    if request.negative_embeds is not None:
        return {**given, "negative_prompt_embeds": batched(pipeline, request.negative_embeds)["prompt_embeds"]}
    if request.embeds is None and request.negative_prompt:
        embeds, _ = pipeline.encode_prompt(request.negative_prompt)
        given["negative_prompt_embeds"] = embeds
    return given
