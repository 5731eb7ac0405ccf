"""What FLUX.1's transformer says about noisy latents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gracetune.models.common.packing import PATCH, pack, references_of, unpack
from gracetune.models.spec import ModelFacts


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Whatever goes in is brought to the dtype of `noisy`.

    A reference (Kontext) is further tokens behind the picture's, in a plane of its own; what is answered about it is
    nobody's target.
    """
    pictures = [noisy, *references_of(batch)]
    tokens = [pack(picture.to(noisy.dtype)) for picture in pictures]
    caption, guidance = batch["prompt_embeds"].to(noisy.dtype), facts.details["guidance"]
    answer: Tensor = denoiser(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=facts.schedule.model_time(level),
        guidance=None if guidance is None else torch.full_like(level, guidance, dtype=torch.float32),
        pooled_projections=batch["pooled_prompt_embeds"].to(noisy.dtype),
        encoder_hidden_states=caption,
        txt_ids=torch.zeros(caption.shape[1], 3, device=noisy.device),
        img_ids=torch.cat([_places(picture, plane) for plane, picture in enumerate(pictures)]),
        return_dict=False,
    )[0]
    height, width = noisy.shape[-2:]
    return unpack(answer[:, : tokens[0].shape[1]], height, width)


def _places(latents: Tensor, plane: int) -> Tensor:
    """[tokens, 3]: plane, row and column of each token."""
    rows, columns = (torch.arange(side // PATCH, device=latents.device) for side in latents.shape[-2:])
    planes = torch.full((1,), plane, device=latents.device)
    return torch.cartesian_prod(planes, rows, columns).float()
