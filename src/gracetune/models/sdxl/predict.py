"""What SDXL's U-Net says about noisy latents."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gracetune.models.spec import ModelFacts


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """See `models.spec.Predict`. Whatever goes in is brought to the dtype of `noisy`, except the sizes in `time_ids`:
    in bfloat16 many of them would be others."""
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
