"""Captions as messages to a language model, and the hidden states a denoiser reads (Z-Image, FLUX.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def in_chat_template(tokenizer: Any, text: str, *, thinking: bool) -> str:
    """The caption as a user's message in Qwen3's chat template, up to where the model would answer."""
    message = [{"role": "user", "content": text}]
    result: str = tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return result


def tapped_layers(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """The inputs of these layers [B, tokens, width] side by side: [B, tokens, width x layers]."""
    return torch.cat([hidden_states[layer] for layer in layers], dim=-1)
