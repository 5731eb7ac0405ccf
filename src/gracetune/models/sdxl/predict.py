"""The inputs and the prediction of SDXL's U-Net."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gracetune.models.spec import ModelFacts


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Inputs are cast to the dtype of `noisy`, except the sizes in `time_ids`, many of which
    bfloat16 would round."""
    answer: Tensor = denoiser(
        noisy,
        facts.schedule.model_time(level),
        encoder_hidden_states=batch["prompt_embeds"].to(noisy.dtype),
        added_cond_kwargs={
            "text_embeds": batch["pooled_prompt_embeds"].to(noisy.dtype),
            "time_ids": batch["time_ids"],
        },
        return_dict=False,
    )[0]
    return answer
