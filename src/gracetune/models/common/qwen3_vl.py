"""Qwen3-VL as a text encoder: the outputs of several of its layers, for captions without images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def tapped_layers(text_encoder: Any, ids: Tensor, layers: Sequence[int]) -> Tensor:
    """The outputs [B, tokens, layers, width] of these decoder layers, before the model's last norm.

    `ids` [B, tokens] have no padding. `text_encoder` is a `Qwen3VLModel`; layers count from 0.
    """
    model = text_encoder.language_model
    found: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(_layer: nn.Module, _given: Any, output: Any) -> None:
            found[number] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        for number in layers:
            stack.callback(model.layers[number].register_forward_hook(keep(number)).remove)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return torch.stack([found[number] for number in layers], dim=2)
