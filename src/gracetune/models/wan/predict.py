"""The inputs and the prediction of Wan's denoisers.

B samples, C latent channels, F latent frames, H x W latent pixels, T tokens of the longest caption. Everything is in
the dtype of `noisy`: the caller chooses the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.models.spec import ModelFacts
from gracetune.models.wan.load import TEXT_TOKENS


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """[B, C, F, H, W], noise - latents. Padding in `prompt_embeds` [B, T, D] must be zeros, as in pretraining."""
    time = facts.schedule.model_time(level)
    states = noisy
    if facts.details["from_image"]:
        states = torch.cat([noisy, batch["condition"].to(noisy)], dim=1)
    elif facts.details["expand_timesteps"] and "condition" in batch:
        states, time = _from_first_frame(noisy, time, batch["condition"].to(noisy), facts.details["patch_size"])
    image = batch["image_embeds"].to(noisy) if facts.details["image_encoder"] else None
    answer: Tensor = denoiser(
        hidden_states=states,
        timestep=time,
        encoder_hidden_states=padded(batch["prompt_embeds"].to(noisy)),
        encoder_hidden_states_image=image,
        return_dict=False,
    )[0]
    return answer


def recorded_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pads captions of any length to one shape, as the denoiser gets them. It attends to the padding, so there is no
    mask."""
    given = {name: one for name, one in batch.items() if name in ("condition", "image_embeds")}
    return {**given, "prompt_embeds": padded(batch["prompt_embeds"])}


def padded(embeds: Tensor) -> Tensor:
    """[B, T, D] -> [B, 512, D]."""
    return F.pad(embeds, (0, 0, 0, TEXT_TOKENS - embeds.shape[1]))


def _from_first_frame(noisy: Tensor, time: Tensor, first: Tensor, patch: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Replace the first frame by the clean one, and return a time for every token: 0 for those of the first frame.

    Only used here, although diffusers' pipeline always gives every token its own time. If all times are equal, one time
    per sample gives the same result and saves 6 float32 values per token and channel in every block.
    """
    states = torch.cat([first, noisy[:, :, 1:]], dim=2)
    _, _, frames, height, width = noisy.shape
    times = time[:, None].repeat(1, frames // patch[0])  # [B, F]
    times[:, 0] = 0
    per_frame = (height // patch[1]) * (width // patch[2])
    return states, times.repeat_interleave(per_frame, dim=1)
