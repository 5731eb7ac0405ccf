"""The inputs and the prediction of Qwen-Image's transformer."""

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

    Reference tokens follow the image's. What the model predicts for them is discarded. A batch without
    `prompt_attention_mask` has captions of one length.
    """
    images = [noisy, *references_of(batch)]
    shapes = [(1, image.shape[-2] // PATCH, image.shape[-1] // PATCH) for image in images]
    tokens = [pack(image.to(noisy.dtype)) for image in images]
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
