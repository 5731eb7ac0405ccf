"""The loss scale of fp16: it grows while gradients are finite and shrinks when they are not. It is 1 in bf16 and fp32.

`torch.amp.GradScaler` reads whether gradients overflowed on the host. Here everything stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gracetune.checkpoint.state_parts import SavedState

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
"""The defaults of `torch.amp.GradScaler`. The interval is in steps with finite gradients."""


class LossScale:
    name = "loss_scale"

    def __init__(self, device: torch.device, *, first: float = 2.0**16) -> None:
        self._scale = torch.full((), first, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def skips(self) -> bool:
        """Whether a step with non-finite gradients is skipped as an ordinary event."""
        return True

    @property
    def factor(self) -> float | Tensor:
        """What gradients are multiplied by to remove the scale."""
        return self._scale.reciprocal()

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def update(self, norm: Tensor) -> None:
        found = (~norm.isfinite()).float()
        torch._amp_update_scale_(self._scale, self._growth, found, GROWTH, BACKOFF, INTERVAL)

    def save(self) -> SavedState:
        return SavedState({"version": 1}, {"scale": self._scale, "growth": self._growth})

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._scale.copy_(tensors["scale"])
        self._growth.copy_(tensors["growth"])


class NoScale:
    """The scale of bf16 and fp32: always 1."""

    skips = False
    factor = 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def update(self, norm: Tensor) -> None: ...
