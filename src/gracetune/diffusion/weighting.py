"""The weight of a sample's error: the loss per element, a mask over elements, and a weight by noise level.

    SNR(u) = a(u)^2 / s(u)^2
    min-SNR        min(SNR, g)         divided by SNR for epsilon, by SNR + 1 for v     (g is `snr_gamma`)
    soft min-SNR   SNR g / (SNR + g)   divided likewise; without `snr_gamma`, g is 1 (latents of variance 1)
    debiased       1 / sqrt(SNR) for epsilon, 1 / (SNR + 1) for v; SNR is clamped to [1e-3, 1e3]
    bell           flow only: exp(-2 (u - 1/2)^2), lowered to 0 at both ends, scaled to a mean of 1 over uniform u
    half bell      the same for u > 1/2, the bell's height below
    measured       flow only: a table (`measured_weights`)

The weights of min-SNR and debiased multiply if both are set. Flow matching defines no such SNR, so there they are 1.
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
"""The bell's height at u = 0 and u = 1, before it is lowered."""
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _EDGE
"""The integral of the lowered bell over [0, 1]."""
_LEAST_SNR, _MOST_SNR = 1e-3, 1e3


def snr(schedule: NoiseSchedule, level: Tensor) -> Tensor:
    """SNR, [B] in float32; infinite for clean latents."""
    a, s = schedule.coefficients(level)
    return (a / s).square()


def min_snr_weight(ratio: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    """The min-SNR weight (Hang et al. 2023) for `ratio`, the SNR."""
    if prediction == "epsilon":
        return (gamma / ratio).clamp(max=1.0)
    return ratio.clamp(max=gamma) / (ratio + 1.0)


def soft_min_snr_weight(ratio: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    """The soft min-SNR weight, a smooth form of the minimum. Written so that it is finite for SNR 0 and infinity."""
    if prediction == "epsilon":
        return gamma / (ratio + gamma)
    return gamma / ((1.0 + gamma / ratio) * (ratio + 1.0))


def debiased_weight(ratio: Tensor, prediction: Prediction) -> Tensor:
    """The debiased-estimation weight (Yu et al. 2023)."""
    ratio = ratio.clamp(_LEAST_SNR, _MOST_SNR)
    return ratio.rsqrt() if prediction == "epsilon" else 1.0 / (ratio + 1.0)


def bell_weight(level: Tensor) -> Tensor:
    """The bell over noise levels, with a mean of 1 over uniform levels."""
    bell = torch.exp(-2.0 * (level.float() - 0.5).square()) - _EDGE
    # At the ends, rounding can make the difference slightly negative.
    return bell.clamp(min=0.0) / _BELL_MEAN


LevelWeights = Literal["bell", "half_bell", "measured"]
_LEVEL_WEIGHTS: dict[LevelWeights | None, str] = {
    None: "1 at every noise level",
    "bell": "a bell curve around the middle noise levels, 1 on average",
    "half_bell": "a bell curve around the middle noise levels that does not fall towards low noise levels",
    "measured": "by noise level, from ai-toolkit's measured table",
}


@dataclass(frozen=True)
class Weighting:
    """The weighting of samples, decided once from the config, with its reason."""

    reason: str
    warning: str | None = None
    """Names settings without an effect on this model."""
    gamma: float | None = None
    soft: bool = False
    debiased: bool = False
    by_level: LevelWeights | None = None

    @classmethod
    def from_config(cls, objective: Objective, schedule: NoiseSchedule) -> Weighting:
        """The weighting for an objective, with a warning about settings that have no effect on this schedule."""
        flow = schedule.prediction == "flow"
        without_effect = [
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
        if flow and without_effect:
            warning = f"{', '.join(without_effect)}: no effect with flow matching, which has no SNR: every weight is 1"
        elif by_level and not flow:
            key = "timesteps weighted" if objective.timestep_weights is None else f"timestep_weights {by_level}"
            warning = f"{key}: no effect with {schedule.prediction}, only with flow matching: every weight is 1"
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
        return cls(reason, warning, gamma=gamma, soft=objective.soft_min_snr, debiased=objective.debiased)

    def weights(self, schedule: NoiseSchedule, level: Tensor) -> Tensor:
        """The weights of samples at these levels, [B] in float32, on the level's device."""
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
        # Copied to a device once, because every copy would synchronize the host.
        table = self._tables.get(level.device)
        if table is None:
            table = self._tables[level.device] = torch.tensor(MEASURED, dtype=torch.float32, device=level.device)
        last = len(MEASURED) - 1
        return table[((1.0 - level.float()) * len(MEASURED)).round().long().clamp(0, last)]


def huber_delta(objective: Objective, schedule: NoiseSchedule, level: Tensor) -> float | Tensor:
    """c at these noise levels: one number, or [B].

    exponential    c0^(t / T), T steps
    snr            c0 + (1 - c0) / (1 + r)^2, with r = s / a; for flow matching r = sqrt(a / (s + 1e-4)), as in
    SimpleTuner
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
    """The loss of every element, in float32. `delta` is the result of `huber_delta` if it depends on the noise level.

    huber, smooth_l1 and pseudo_huber are the smooth forms used by SimpleTuner and ai-toolkit, with c = `huber_delta`:
    2 c (sqrt(r^2 + c^2) - c) (about r^2 for small r), the same without the factor c, and also without the factor 2.
    """
    error = prediction.float() - target.float()
    if objective.loss == "mse":
        return error.square()
    if objective.loss == "mae":
        return error.abs()
    c = objective.huber_delta if delta is None else delta
    if isinstance(c, Tensor):
        c = per_sample(c, error)
    # sqrt(r^2 + c^2) - c, rearranged so that small r do not cancel.
    square = error.square()
    smooth = 2.0 * square / ((square + c * c).sqrt() + c)
    return {"huber": c, "smooth_l1": 1.0, "pseudo_huber": 0.5}[objective.loss] * smooth


def sample_losses(
    prediction: Tensor, target: Tensor, objective: Objective, mask: Tensor | None = None,
    delta: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B]: each sample's mean of mask x loss over all its elements.

    The mask broadcasts over [B, C, ...]. As in SimpleTuner and ai-toolkit the mean includes masked-out elements, so a
    mostly masked sample weighs proportionally less.
    """
    losses = element_losses(prediction, target, objective, delta)
    if mask is not None:
        losses = losses * mask.to(losses.device, torch.float32)
    return losses.flatten(1).mean(1)
