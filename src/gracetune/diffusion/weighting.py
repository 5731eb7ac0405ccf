"""What a sample's error counts: the loss per element, a mask over them, and a weight by noise level.

    SNR(u) = a(u)^2 / s(u)^2
    min-SNR        min(SNR, g)         divided by SNR for epsilon, by SNR + 1 for v     (g is `snr_gamma`)
    soft min-SNR   SNR g / (SNR + g)   divided likewise; g is 1 where `snr_gamma` is unset (latents of variance 1)
    debiased       1 / sqrt(SNR) for epsilon, 1 / (SNR + 1) for v; SNR is kept within [1e-3, 1e3]
    weighted       flow only: exp(-2 (u - 1/2)^2), lowered to 0 at both ends, scaled to a mean of 1 over uniform u

With min-SNR and debiased both on, the weights multiply. Flow matching has no such SNR: all samples weigh 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.config.run_config import Objective
from gracetune.diffusion.schedule import NoiseSchedule, Prediction

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


@dataclass(frozen=True)
class Weighting:
    """How samples weigh, decided once, and why."""

    reason: str
    warning: str | None = None
    """What was asked for and is not done; to be said once."""
    gamma: float | None = None
    soft: bool = False
    debiased: bool = False
    bell: bool = False

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
        bell = objective.timesteps == "weighted"
        warning = None
        if flow and asked:
            warning = f"{', '.join(asked)}: no effect with flow matching, which has no SNR table: every sample weighs 1"
        elif bell and not flow:
            warning = f"timesteps weighted: its weights are for flow matching; with {schedule.prediction} they are 1"
        if flow:
            reason = "a bell around the middle noise levels, 1 on average" if bell else "1 at every noise level"
            return cls(reason, warning, bell=bell)
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
        if self.bell:
            return bell_weight(level)
        weight = torch.ones_like(level, dtype=torch.float32)
        if self.gamma is None and not self.debiased:
            return weight
        ratio = snr(schedule, level)
        if self.gamma is not None:
            weight = (soft_min_snr_weight if self.soft else min_snr_weight)(ratio, self.gamma, schedule.prediction)
        return weight * debiased_weight(ratio, schedule.prediction) if self.debiased else weight


def element_losses(prediction: Tensor, target: Tensor, objective: Objective) -> Tensor:
    """Of every element, in float32.

    huber and smooth_l1 are the smooth forms that the peers' `huber_c` means, with c = `huber_delta`:
    2 c (sqrt(r^2 + c^2) - c), which is r^2 for small r, and the same without the factor c.
    """
    rest = prediction.float() - target.float()
    if objective.loss == "mse":
        return rest.square()
    if objective.loss == "mae":
        return rest.abs()
    c = objective.huber_delta
    # sqrt(r^2 + c^2) - c, written so that small r do not cancel.
    square = rest.square()
    smooth = 2.0 * square / ((square + c * c).sqrt() + c)
    return c * smooth if objective.loss == "huber" else smooth


def sample_losses(prediction: Tensor, target: Tensor, objective: Objective, mask: Tensor | None = None) -> Tensor:
    """[B]: each sample's mean over all its elements of mask x loss.

    The mask broadcasts over [B, C, ...]. As in the peers the mean is over all elements, masked or not: a sample that
    is mostly masked weighs less, in proportion to what is seen of it.
    """
    losses = element_losses(prediction, target, objective)
    if mask is not None:
        losses = losses * mask.to(losses.device, torch.float32)
    return losses.flatten(1).mean(1)
