"""The inputs and the prediction of Z-Image's transformer, in training and in generated images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.pipelines import generate_image, guidance_from_zero
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest
from gracetune.models.z_image.load import TurboPipeline


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`.

    The transformer gets one tensor for each image and caption, and pads both to its multiple of tokens itself. It
    predicts the step from noise to data, the negative of the flow.
    """
    outputs: list[Tensor] = denoiser(
        x=[*noisy.unsqueeze(2)],
        t=facts.schedule.model_time(level),
        cap_feats=_captions(batch, noisy.dtype),
        return_dict=False,
    )[0]
    return -torch.stack(outputs).squeeze(2)


def _captions(batch: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The embedding of each caption [its tokens, width]. A batch without a mask has captions of one length.

    Reading the lengths synchronizes the host with the device: their number of padding tokens decides the shapes.
    """
    embeds = batch["prompt_embeds"].to(dtype)
    mask = batch.get("prompt_attention_mask")
    if mask is None:
        return [*embeds]
    return [own[:length] for own, length in zip(embeds, mask.sum(dim=1).tolist(), strict=True)]


# -- generated images --------------------------------------------------------------------------------------------------


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    _check(request, facts.details["side_multiple"])


def _check(request: SampleRequest, multiple: int) -> None:
    reject([*side_problems(*size_of(request), multiple), *reference_problems(request, "Z-Image")])


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    _check(request, PATCH * pipeline.vae_scale_factor)
    guidance = guidance_from_zero(request, distilled=isinstance(pipeline, TurboPipeline))
    return generate_image(pipeline, request, **_texts(pipeline, request), **guidance)


def _texts(pipeline: Any, request: SampleRequest) -> dict[str, Any]:
    if request.embeds is None or request.negative_embeds is None:
        return {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
    return {
        f"{prefix}prompt_embeds": [*batched(pipeline, entry)["prompt_embeds"]]
        for prefix, entry in (("", request.embeds), ("negative_", request.negative_embeds))
    }
