"""The inputs and the prediction of FLUX.1's transformer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gracetune.models.common.latent_packing import PATCH, pack, references_of, unpack
from gracetune.models.spec import ModelFacts


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
    answer: Tensor = denoiser(
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
    return unpack(answer[:, : tokens[0].shape[1]], height, width)


def _positions(latents: Tensor, plane: int) -> Tensor:
    """[tokens, 3]: plane, row and column of each token, for RoPE."""
    rows, columns = (torch.arange(side // PATCH, device=latents.device) for side in latents.shape[-2:])
    planes = torch.full((1,), plane, device=latents.device)
    return torch.cartesian_prod(planes, rows, columns).float()
