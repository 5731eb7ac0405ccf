"""A reference Automagic: one tensor at a time, with float64 learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gracetune.optim.element_rates import RateLimits


@dataclass
class Reference:
    parameter: Tensor
    lr: float = 1e-6
    limits: RateLimits = field(default_factory=RateLimits)
    eps: float = 1e-30
    clip: float = 1.0
    beta2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        start = min(max(self.lr, self.limits.min_lr), self.limits.max_lr)
        self.rates = torch.full(self.parameter.shape, start, dtype=torch.float64)
        self.last: Tensor | None = None
        shape = self.parameter.shape
        self.row, self.col = torch.zeros(shape[:-1]), torch.zeros(shape[:-2] + shape[-1:])
        self.square = torch.zeros(shape)

    def step(self, gradient: Tensor) -> None:
        update = self._clipped(self._normalised(gradient.float()))
        positive = update > 0
        if self.last is not None:
            bump = torch.where(self.last == positive, self.limits.lr_bump, -self.limits.lr_bump)
            self.rates = (self.rates + bump).clamp(self.limits.min_lr, self.limits.max_lr)
        self.last = positive
        rates = self.rates.float()
        value = self.parameter.float()
        self.parameter.copy_(value - rates * update - rates * self.weight_decay * value)

    def _normalised(self, gradient: Tensor) -> Tensor:
        squares = gradient**2 + self.eps
        keep, rest = self.beta2, 1 - self.beta2
        if gradient.ndim < 2:
            self.square = keep * self.square + rest * squares
            return gradient / self.square.sqrt()
        self.row = keep * self.row + rest * squares.mean(-1)
        self.col = keep * self.col + rest * squares.mean(-2)
        share = self.row / self.row.mean(-1, keepdim=True)
        return gradient / (share.unsqueeze(-1) * self.col.unsqueeze(-2)).sqrt()

    def _clipped(self, update: Tensor) -> Tensor:
        rms = float(update.square().mean().sqrt())
        return update / max(1.0, rms / self.clip)
