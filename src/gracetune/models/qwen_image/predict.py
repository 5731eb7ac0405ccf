"""The inputs and the prediction of Qwen-Image's transformer, in training and in generated images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import QwenImageEditPlusPipeline, QwenImagePipeline
from torch import Tensor, nn

from gracetune.errors import Problem
from gracetune.models.common.latent_packing import PATCH, pack, references_of, unpack
from gracetune.models.common.pipelines import generate_image
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.qwen_image.load import PIPELINES
from gracetune.models.spec import BlockRouting, ModelFacts, Sampled, SampleRequest
from gracetune.models.token_routing import select_tokens


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`.

    Reference tokens follow the image's. What the model predicts for them is discarded. A batch without
    `prompt_attention_mask` has captions of one length.
    """
    images = [noisy, *references_of(batch)]
    shapes = [(1, image.shape[-2] // PATCH, image.shape[-1] // PATCH) for image in images]
    tokens = [pack(image.to(noisy.dtype)) for image in images]
    prediction: Tensor = denoiser(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=facts.schedule.model_time(level),
        encoder_hidden_states=batch["prompt_embeds"].to(noisy.dtype),
        encoder_hidden_states_mask=batch.get("prompt_attention_mask"),
        img_shapes=[shapes] * len(noisy),
        return_dict=False,
    )[0]
    height, width = noisy.shape[-2:]
    return unpack(prediction[:, : tokens[0].shape[1]], height, width)


# -- token routing -----------------------------------------------------------------------------------------------------


def _select(given: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
    """Select the kept tokens from a block's arguments (`BlockRouting.select`).

    `image_rotary_emb` has tables of the image [tokens, pairs, 2] and of the caption. `modulate_index` [B, tokens] marks
    reference tokens (Edit-2511).
    """
    image, caption = given["image_rotary_emb"]
    chosen: dict[str, Any] = {"image_rotary_emb": (select_tokens(image[None], kept), caption)}
    if given["modulate_index"] is not None:
        chosen["modulate_index"] = select_tokens(given["modulate_index"], kept)
    return chosen


ROUTING = BlockRouting((PATCH, PATCH), _select, output_index=1, references=references_of)


# -- generated images --------------------------------------------------------------------------------------------------


DEFAULT_NEGATIVE = " "
"""Replaces an empty negative prompt: the authors of the weights use a space."""

_FEWEST_STEPS = 2


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    """Raise for a request that the model cannot generate, before a pipeline is loaded."""
    details = facts.details
    _check(request, PIPELINES[details["pipeline"]], details["side_multiple"], stretched=details["stretched_schedule"])


def _check(request: SampleRequest, pipeline: Any, multiple: int, *, stretched: bool) -> None:
    if pipeline is QwenImagePipeline:
        references = reference_problems(request, "Qwen-Image")
    elif pipeline is QwenImageEditPlusPipeline:
        references = reference_problems(request, "Qwen-Image-Edit-Plus", least=1, most=None)
    else:
        references = reference_problems(request, "Qwen-Image-Edit", least=1, most=1)
    steps = _step_problems(request) if stretched else ()
    reject([*side_problems(*size_of(request), multiple), *steps, *references])


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    options: dict[str, Any] = {} if request.guidance is None else {"true_cfg_scale": request.guidance}
    stretched = bool(pipeline.scheduler.config.shift_terminal)
    _check(request, type(pipeline), PATCH * pipeline.vae_scale_factor, stretched=stretched)
    if isinstance(pipeline, QwenImageEditPlusPipeline):
        options["image"] = list(request.references)
    elif not isinstance(pipeline, QwenImagePipeline):
        options["image"] = request.references[0]
    options |= _texts(pipeline, request)
    return generate_image(pipeline, request, **options)


def _texts(pipeline: Any, request: SampleRequest) -> dict[str, Any]:
    if request.embeds is None or request.negative_embeds is None:
        return {"prompt": request.prompt, "negative_prompt": request.negative_prompt or DEFAULT_NEGATIVE}
    found: dict[str, Any] = {}
    for prefix, entry in (("", request.embeds), ("negative_", request.negative_embeds)):
        embeds = batched(pipeline, entry)["prompt_embeds"]
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        found |= {f"{prefix}prompt_embeds": embeds, f"{prefix}prompt_embeds_mask": mask}
    return found


def _step_problems(request: SampleRequest) -> Iterator[Problem]:
    """The schedule is stretched so that its last step ends at a fixed level, which divides by zero for a single
    step."""
    if request.steps < _FEWEST_STEPS:
        expected = f"{_FEWEST_STEPS} or more: this model's schedule is undefined for one step"
        hint = f"set at least {_FEWEST_STEPS}; Qwen-Image is usually sampled with 50"
        yield Problem("steps", str(request.steps), expected, hint)
