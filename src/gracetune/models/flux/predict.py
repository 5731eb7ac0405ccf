"""The inputs and the prediction of FLUX.1's transformer, in training and in generated images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor, nn

from gracetune.models.common.latent_packing import PATCH, pack, references_of, unpack
from gracetune.models.common.pipelines import generate_image
from gracetune.models.common.sample_checks import batched, reference_problems, reject, side_problems, size_of
from gracetune.models.spec import BlockRouting, ModelFacts, Sampled, SampleRequest
from gracetune.models.token_routing import select_tokens


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`.

    Reference tokens (Kontext) follow the image's, in a plane of their own. What the model predicts for them is
    discarded.
    """
    images = [noisy, *references_of(batch)]
    tokens = [pack(image.to(noisy.dtype)) for image in images]
    caption, guidance = batch["prompt_embeds"].to(noisy.dtype), facts.details["guidance"]
    prediction: Tensor = denoiser(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=facts.schedule.model_time(level),
        guidance=None if guidance is None else torch.full_like(level, guidance, dtype=torch.float32),
        pooled_projections=batch["pooled_prompt_embeds"].to(noisy.dtype),
        encoder_hidden_states=caption,
        txt_ids=torch.zeros(caption.shape[1], 3, device=noisy.device),
        img_ids=torch.cat([_positions(image, plane) for plane, image in enumerate(images)]),
        return_dict=False,
    )[0]
    height, width = noisy.shape[-2:]
    return unpack(prediction[:, : tokens[0].shape[1]], height, width)


def _positions(latents: Tensor, plane: int) -> Tensor:
    """[tokens, 3]: plane, row and column of each token, for RoPE."""
    rows, columns = (torch.arange(side // PATCH, device=latents.device) for side in latents.shape[-2:])
    planes = torch.full((1,), plane, device=latents.device)
    return torch.cartesian_prod(planes, rows, columns).float()


# -- token routing -----------------------------------------------------------------------------------------------------


def _select(given: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
    """`image_rotary_emb`: cosine and sine [caption and image tokens, channels]; the caption's stay. The selected ones
    are [B, tokens, channels] if there are several samples, because their tokens differ."""
    caption = given["encoder_hidden_states"].shape[1]

    def own(table: Tensor) -> Tensor:
        shared = table[None, :caption].expand(len(kept), -1, -1)
        tables = torch.cat([shared, select_tokens(table[None, caption:], kept)], dim=1)
        return tables if len(kept) > 1 else tables[0]

    return {"image_rotary_emb": tuple(own(table) for table in given["image_rotary_emb"])}


ROUTING = BlockRouting((PATCH, PATCH), _select, output_index=1, references=references_of)


# -- generated images --------------------------------------------------------------------------------------------------


_SHORT = 256
"""Caption tokens of schnell, the weights without a guidance input."""


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    edits = facts.details["pipeline"] == FluxKontextPipeline.__name__
    _check(request, facts.details["side_multiple"], edits=edits)


def _check(request: SampleRequest, multiple: int, *, edits: bool) -> None:
    model, references = ("FLUX.1 Kontext", 1) if edits else ("FLUX.1", 0)
    sides = side_problems(*size_of(request), multiple)
    reject([*sides, *reference_problems(request, model, least=references, most=references)])


def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    edits = isinstance(pipeline, FluxKontextPipeline)
    _check(request, PATCH * pipeline.vae_scale_factor, edits=edits)
    width, height = size_of(request)
    options: dict[str, Any] = {} if request.guidance is None else {"guidance_scale": request.guidance}
    if request.negative_prompt:
        warnings.warn("negative_prompt: no effect, FLUX.1 does not support negative prompts", stacklevel=2)
    if edits:
        # The pipeline scales the image to `max_area` pixels, whatever size is requested.
        options |= {"image": request.references[0], "max_area": width * height}
    if not pipeline.transformer.config.guidance_embeds:
        options["max_sequence_length"] = _SHORT
    if request.embeds is None:
        options["prompt"] = request.prompt
    else:
        options |= batched(pipeline, request.embeds)
    return generate_image(pipeline, request, **options)
