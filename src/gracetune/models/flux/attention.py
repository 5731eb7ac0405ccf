"""FLUX's attention as cuDNN can take it back.

In the blocks with one stream what attention answers lies beside the feed-forward's part in one wide tensor, and so does
its gradient: rows far apart. From such a one cuDNN's backward pass computes other gradients, without an error, or reads
where nothing is (`families-exploration-h200.json`: cuDNN 9.19, torch 2.11).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import Tensor, nn


def use_whole_gradients(denoiser: nn.Module) -> None:
    for module in denoiser.modules():
        if isinstance(module, FluxAttention) and module.pre_only:
            module.set_processor(cast(Any, WholeGradient)())


class WholeGradient(FluxAttnProcessor):
    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        """Under diffusers' own names for the arguments: it looks at them."""
        call: Any = super().__call__
        answer: Tensor = _Whole.apply(  # type: ignore[no-untyped-call]
            call(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        )
        return answer


class _Whole(torch.autograd.Function):
    """Nothing, and a gradient whose rows are next to each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
