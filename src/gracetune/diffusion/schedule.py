"""How clean latents become noisy, and what a denoiser is asked for.

One letter set for all of them, `x` clean, `e` noise, `u` the noise level in [0, 1] (0 clean, 1 pure noise):

    noisy(x, e, u) = a(u) x + s(u) e
    flow           a = 1 - u            s = u              asked for e - x
    epsilon        a, s of the DDPM     u = t / T          asked for e
    v_prediction   as above                                asked for a e - s x
    continuous v   a = cos(pi u / 2)    s = sin(pi u / 2)  asked for a e - s x

Levels are tensors of shape [B]; whatever has pixels is [B, ...].
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
    @property
    def prediction(self) -> Prediction: ...

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """a and s, in float32, shaped [B]."""

    def model_time(self, level: Tensor) -> Tensor:
        """What the denoiser is told about the level, shaped [B]."""


def noisy(schedule: NoiseSchedule, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Latents at noise level `level`, in the clean latents' dtype; the arithmetic is done in float32."""
    a, s = (per_sample(part, clean) for part in schedule.coefficients(level))
    return (a * clean.float() + s * noise.float()).to(clean.dtype)


def target(schedule: NoiseSchedule, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """What the denoiser should answer, in float32."""
    x, e = clean.float(), noise.float()
    if schedule.prediction == "flow":
        return e - x
    if schedule.prediction == "epsilon":
        return e
    a, s = (per_sample(part, clean) for part in schedule.coefficients(level))
    return a * e - s * x


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, ...], to be multiplied with `like`."""
    return value.to(like.device).reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(frozen=True)
class Flow:
    """Straight paths from data to noise."""

    time_scale: float = 1000.0
    """The denoiser is told level x this."""

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
    """A table of `alphas_cumprod`: the level of step t is (t + 1) / T; levels in between are rounded up."""

    alphas_cumprod: tuple[float, ...]
    prediction: Prediction = "epsilon"

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def _table(self, device: torch.device) -> Tensor:
        """Copied to a device once: every further copy would make the host wait for it."""
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = torch.tensor(self.alphas_cumprod, dtype=torch.float64, device=device)
        return table

    def step(self, level: Tensor) -> Tensor:
        """The whole step a level belongs to."""
        steps = len(self.alphas_cumprod)
        # A level that was computed as (t + 1) / T in float32 must come back as t.
        return (level.double() * steps - 1e-3).ceil().long().sub(1).clamp(0, steps - 1)

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        kept = self._table(level.device)[self.step(level)]
        return kept.sqrt().float(), (1.0 - kept).sqrt().float()

    def model_time(self, level: Tensor) -> Tensor:
        return self.step(level)


@dataclass(frozen=True)
class Cosine:
    """A quarter turn from data to noise; the denoiser is told the level itself."""

    @property
    def prediction(self) -> Prediction:
        return "v_prediction"

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        angle = level.float() * (math.pi / 2)
        return angle.cos(), angle.sin()

    def model_time(self, level: Tensor) -> Tensor:
        return level.float()
