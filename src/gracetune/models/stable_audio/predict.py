"""The inputs and the prediction of Stable Audio's denoiser.

B samples, C latent channels, L latent columns, T tokens of the longest caption, D the width of the conditioning.
Everything is in the dtype of `noisy`: the caller chooses the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn

from gracetune.models.spec import ModelFacts


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """[B, C, L], v. Padding in `prompt_embeds` [B, T, D] must be zeros, as in pretraining."""
    text, seconds = batch["prompt_embeds"].to(noisy), batch["seconds_embeds"].to(noisy)
    answer: Tensor = denoiser(
        noisy,
        facts.schedule.model_time(level),
        encoder_hidden_states=_conditioning(text, seconds, facts.details["text_tokens"]),
        global_hidden_states=seconds.flatten(1)[:, None],
        rotary_embedding=_rotary(noisy, facts.details["rotary_size"]),
        return_dict=False,
    )[0]
    return answer


def _conditioning(text: Tensor, seconds: Tensor, tokens: int) -> Tensor:
    """[B, tokens + 2, D]. Without a caption (all zeros) the seconds are zeros here too, as in the pipeline's
    guidance."""
    captioned = text.ne(0).flatten(1).any(dim=1)
    text = F.pad(text, (0, 0, 0, tokens - text.shape[1]))
    return torch.cat([text, seconds * captioned[:, None, None]], dim=1)


def _rotary(noisy: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tables for the global state in front and every column. On the device, or each block would copy them there."""
    positions: Any = torch.arange(1 + noisy.shape[2], device=noisy.device)  # a tensor works, but is not annotated
    cos, sin = get_1d_rotary_pos_embed(size, positions, use_real=True, repeat_interleave_real=False)
    return cos, sin
