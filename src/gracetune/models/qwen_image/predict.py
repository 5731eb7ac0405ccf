"""What Qwen-Image's transformer says about noisy latents."""

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

    References are further tokens behind the picture's; what is answered about them is nobody's target. A batch without
    `prompt_attention_mask` has captions of one length.
    """
    pictures = [noisy, *references_of(batch)]
    shapes = [(1, picture.shape[-2] // PATCH, picture.shape[-1] // PATCH) for picture in pictures]
    tokens = [pack(picture.to(noisy.dtype)) for picture in pictures]
    answer: Tensor = denoiser(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=facts.schedule.model_time(level),
        encoder_hidden_states=batch["prompt_embeds"].to(noisy.dtype),
        encoder_hidden_states_mask=batch.get("prompt_attention_mask"),
        img_shapes=[shapes] * len(noisy),
        return_dict=False,
    )[0]
    height, width = noisy.shape[-2:]
    return unpack(answer[:, : tokens[0].shape[1]], height, width)
