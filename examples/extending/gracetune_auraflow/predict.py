"""The prediction of AuraFlow's transformer for noisy latents."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gracetune.extension import ModelFacts


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `gracetune.models.spec.Predict`. Inputs are cast to the dtype of `noisy`."""
    prediction: Tensor = denoiser(
        noisy,
        encoder_hidden_states=batch["prompt_embeds"].to(noisy.dtype),
        timestep=facts.schedule.model_time(level),
        return_dict=False,
    )[0]
    return prediction
