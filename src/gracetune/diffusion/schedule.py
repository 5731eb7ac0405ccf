"""Noise schedules: how clean latents become noisy, and the training target.

With clean latents `x`, noise `e` and the noise level `u` in [0, 1] (0 clean, 1 pure noise):

    noisy(x, e, u) = a(u) x + s(u) e
    flow           a = 1 - u            s = u              target e - x
    epsilon        a, s of the DDPM     u = t / T          target e
    v_prediction   as above                                target a e - s x
    continuous v   a = cos(pi u / 2)    s = sin(pi u / 2)  target a e - s x

Levels have shape [B], latents [B, ...].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

Prediction = Literal["flow", "epsilon", "v_prediction"]


class NoiseSchedule(Protocol):
    """The coefficients and the model time of each noise level."""

    @property
    def prediction(self) -> Prediction: ...

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """a and s, [B] in float32."""

    def model_time(self, level: Tensor) -> Tensor:
        """The timestep input of the denoiser, [B]."""


def noisy(schedule: NoiseSchedule, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """The noisy latents, in the dtype of the clean ones. Computed in float32."""
    a, s = (per_sample(part, clean) for part in schedule.coefficients(level))
    return (a * clean.float() + s * noise.float()).to(clean.dtype)


def target(schedule: NoiseSchedule, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """The training target, in float32."""
    x, e = clean.float(), noise.float()
    if schedule.prediction == "flow":
        return e - x
    if schedule.prediction == "epsilon":
        return e
    a, s = (per_sample(part, clean) for part in schedule.coefficients(level))
    return a * e - s * x


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """[B] reshaped to [B, 1, ...], to broadcast with `like`."""
    return value.to(like.device).reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(frozen=True)
class Flow:
    """Flow matching: straight paths from data to noise."""

    time_scale: float = 1000.0
    """The model time is the level times this."""

    @property
    def prediction(self) -> Prediction:
        return "flow"

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        level = level.float()
        return 1.0 - level, level

    def model_time(self, level: Tensor) -> Tensor:
        return level.float() * self.time_scale


@dataclass(frozen=True)
class Ddpm:
    """A DDPM by its table of `alphas_cumprod`. Step t has the level (t + 1) / T; levels in between round up."""

    alphas_cumprod: tuple[float, ...]
    prediction: Prediction = "epsilon"

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def _table(self, device: torch.device) -> Tensor:
        """The table on a device. Copied once, because every copy would synchronize the host."""
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = torch.tensor(self.alphas_cumprod, dtype=torch.float64, device=device)
        return table

    def step(self, level: Tensor) -> Tensor:
        """The discrete step a level belongs to, [B]."""
        steps = len(self.alphas_cumprod)
        # The tolerance makes a level computed as (t + 1) / T in float32 map back to t.
        return (level.double() * steps - 1e-3).ceil().long().sub(1).clamp(0, steps - 1)

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        kept = self._table(level.device)[self.step(level)]
        return kept.sqrt().float(), (1.0 - kept).sqrt().float()

    def model_time(self, level: Tensor) -> Tensor:
        return self.step(level)


@dataclass(frozen=True)
class Cosine:
    """The trigonometric path from data to noise: a quarter circle. The model time is the level itself."""

    @property
    def prediction(self) -> Prediction:
        return "v_prediction"

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        angle = level.float() * (math.pi / 2)
        return angle.cos(), angle.sin()

    def model_time(self, level: Tensor) -> Tensor:
        return level.float()
