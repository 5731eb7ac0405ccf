"""What a sample's error counts: the loss per element, a mask over them, and a weight by noise level.

    SNR(u) = a(u)^2 / s(u)^2
    min-SNR        min(SNR, g)         divided by SNR for epsilon, by SNR + 1 for v     (g is `snr_gamma`)
    soft min-SNR   SNR g / (SNR + g)   divided likewise; g is 1 where `snr_gamma` is unset (latents of variance 1)
    debiased       1 / sqrt(SNR) for epsilon, 1 / (SNR + 1) for v; SNR is kept within [1e-3, 1e3]
    bell           flow only: exp(-2 (u - 1/2)^2), lowered to 0 at both ends, scaled to a mean of 1 over uniform u
    half bell      the same for u > 1/2, its height for all below
    measured       flow only: a table (`measured_weights`)

With min-SNR and debiased both on, the weights multiply. Flow matching has no such SNR: all samples weigh 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from gracetune.config.run_config import Objective
from gracetune.diffusion.measured_weights import MEASURED
from gracetune.diffusion.schedule import Ddpm, NoiseSchedule, Prediction, per_sample

_EDGE = math.exp(-0.5)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _EDGE
_LEAST_SNR, _MOST_SNR = 1e-3, 1e3


def snr(schedule: NoiseSchedule, level: Tensor) -> Tensor:
    """[B], float32; infinite where there is no noise."""
    a, s = schedule.coefficients(level)
    return (a / s).square()


def min_snr_weight(ratio: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    if prediction == "epsilon":
        return (gamma / ratio).clamp(max=1.0)
    return ratio.clamp(max=gamma) / (ratio + 1.0)


def soft_min_snr_weight(ratio: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    if prediction == "epsilon":
        return gamma / (ratio + gamma)
    return gamma / ((1.0 + gamma / ratio) * (ratio + 1.0))


def debiased_weight(ratio: Tensor, prediction: Prediction) -> Tensor:
    ratio = ratio.clamp(_LEAST_SNR, _MOST_SNR)
    return ratio.rsqrt() if prediction == "epsilon" else 1.0 / (ratio + 1.0)


def bell_weight(level: Tensor) -> Tensor:
    bell = torch.exp(-2.0 * (level.float() - 0.5).square()) - _EDGE
    # At the very ends the difference may come out a rounding error below 0.
    return bell.clamp(min=0.0) / _BELL_MEAN


LevelWeights = Literal["bell", "half_bell", "measured"]
_LEVEL_WEIGHTS: dict[LevelWeights | None, str] = {
    None: "1 at every noise level",
    "bell": "a bell around the middle noise levels, 1 on average",
    "half_bell": "a bell around the middle noise levels, without its fall towards the image",
    "measured": "by noise level, from ai-toolkit's measured table",
}


@dataclass(frozen=True)
class Weighting:
    """How samples weigh, decided once, and why."""

    reason: str
    warning: str | None = None
    """What was asked for and is not done; to be said once."""
    gamma: float | None = None
    soft: bool = False
    debiased: bool = False
    by_level: LevelWeights | None = None

    @classmethod
    def from_config(cls, objective: Objective, schedule: NoiseSchedule) -> Weighting:
        flow = schedule.prediction == "flow"
        asked = [
            name
            for name, on in (
                ("snr_gamma", objective.snr_gamma is not None),
                ("soft_min_snr", objective.soft_min_snr),
                ("debiased", objective.debiased),
            )
            if on
        ]
        by_level = objective.timestep_weights or ("bell" if objective.timesteps == "weighted" else None)
        warning = None
        if flow and asked:
            warning = f"{', '.join(asked)}: no effect with flow matching, which has no SNR table: every sample weighs 1"
        elif by_level and not flow:
            key = "timesteps weighted" if objective.timestep_weights is None else f"timestep_weights {by_level}"
            warning = f"{key}: its weights are for flow matching; with {schedule.prediction} they are 1"
        if flow:
            return cls(_LEVEL_WEIGHTS[by_level], warning, by_level=by_level)
        gamma = objective.snr_gamma
        if objective.soft_min_snr:
            gamma = 1.0 if gamma is None else gamma
        kinds = (
            [f"{'soft ' if objective.soft_min_snr else ''}min-SNR with gamma {gamma:g}"] if gamma is not None else []
        )
        kinds += ["debiased"] if objective.debiased else []
        reason = f"{' and '.join(kinds)}, for {schedule.prediction}" if kinds else "1 at every noise level"
        return cls(reason, warning, gamma, objective.soft_min_snr, objective.debiased)

    def weights(self, schedule: NoiseSchedule, level: Tensor) -> Tensor:
        """[B], float32, on the level's device."""
        if self.by_level == "measured":
            return self._measured(level)
        if self.by_level is not None:
            return bell_weight(level if self.by_level == "bell" else level.clamp(min=0.5))
        weight = torch.ones_like(level, dtype=torch.float32)
        if self.gamma is None and not self.debiased:
            return weight
        ratio = snr(schedule, level)
        if self.gamma is not None:
            weight = (soft_min_snr_weight if self.soft else min_snr_weight)(ratio, self.gamma, schedule.prediction)
        return weight * debiased_weight(ratio, schedule.prediction) if self.debiased else weight

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def _measured(self, level: Tensor) -> Tensor:
        # Copied to a device once: every further copy would make the host wait for it.
        table = self._tables.get(level.device)
        if table is None:
            table = self._tables[level.device] = torch.tensor(MEASURED, dtype=torch.float32, device=level.device)
        last = len(MEASURED) - 1
        return table[((1.0 - level.float()) * len(MEASURED)).round().long().clamp(0, last)]


def huber_delta(objective: Objective, schedule: NoiseSchedule, level: Tensor) -> float | Tensor:
    """c at these noise levels: one number, or [B].

    exponential    c0^(t / T), T steps
    snr            c0 + (1 - c0) / (1 + r)^2, with r = s / a; for flow matching SimpleTuner takes sqrt(a / (s + 1e-4))
    """
    c = objective.huber_delta
    if objective.huber_schedule == "constant" or objective.loss not in ("huber", "smooth_l1", "pseudo_huber"):
        return c
    a, s = schedule.coefficients(level)
    if objective.huber_schedule == "exponential":
        time = schedule.step(level) / len(schedule.alphas_cumprod) if isinstance(schedule, Ddpm) else level.float()
        return torch.exp(math.log(c) * time)
    ratio = (a / (s + 1e-4)).sqrt() if schedule.prediction == "flow" else s / a
    return c + (1.0 - c) / (1.0 + ratio).square()


def element_losses(
    prediction: Tensor, target: Tensor, objective: Objective, delta: float | Tensor | None = None
) -> Tensor:
    """Of every element, in float32. `delta` is that of `huber_delta`, where the noise level decides about it.

    huber, smooth_l1 and pseudo_huber are the smooth forms that the peers mean, with c = `huber_delta`:
    2 c (sqrt(r^2 + c^2) - c), which is r^2 for small r; the same without the factor c; and without the factor 2 either.
    """
    rest = prediction.float() - target.float()
    if objective.loss == "mse":
        return rest.square()
    if objective.loss == "mae":
        return rest.abs()
    c = objective.huber_delta if delta is None else delta
    if isinstance(c, Tensor):
        c = per_sample(c, rest)
    # sqrt(r^2 + c^2) - c, written so that small r do not cancel.
    square = rest.square()
    smooth = 2.0 * square / ((square + c * c).sqrt() + c)
    return {"huber": c, "smooth_l1": 1.0, "pseudo_huber": 0.5}[objective.loss] * smooth


def sample_losses(
    prediction: Tensor, target: Tensor, objective: Objective, mask: Tensor | None = None,
    delta: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B]: each sample's mean over all its elements of mask x loss.

    The mask broadcasts over [B, C, ...]. As in the peers the mean is over all elements, masked or not: a sample that
    is mostly masked weighs less, in proportion to what is seen of it.
    """
    losses = element_losses(prediction, target, objective, delta)
    if mask is not None:
        losses = losses * mask.to(losses.device, torch.float32)
    return losses.flatten(1).mean(1)
