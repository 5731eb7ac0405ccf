"""The noise level a sample trains at: a pure function of the seed and the sample's index.

One uniform random number v in [0, 1) passes through increasing functions only. Their composition therefore has an
inverse, and restricting samples to a noise range means mapping v into a smaller interval; nothing has to be rejected:

    bias(v)     balanced: v · content: 1 - (1 - v)^3, towards noise · style: v^3, towards the image
    quantile    uniform, shift, weighted: identity · sigmoid, logit_normal: 1 / (1 + exp(-scale z(v))) · beta
    shift(u)    s u / (1 + (s - 1) u), then 1 - (1 - t) (1 - u) with t = `shift_terminal`; flow matching only

u = shift(quantile(bias(v))). `one_step` is always pure noise. `content` has the distribution of 1 - v^3.

`timestep_bias_over: noise_range` reproduces ai-toolkit, which restricts to the noise range first and whose bias then
picks one of 1000 steps (for a tenth of all samples the very last one): u = shift(quantile(step(range(bias(v))))). For
its non-uniform distributions the steps are 1000 random levels in order, new for every batch, so a step is spread over
levels (`_picked`).

With `stratified`, sample i of n in a batch (from 0) uses (n - 1 - i + v) / n instead of v.
A model with a table of discrete steps trains at the level of the step that u falls into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from gracetune.config.run_config import Objective
from gracetune.diffusion.beta import beta_cdf, beta_quantile
from gracetune.diffusion.schedule import Ddpm, NoiseSchedule
from gracetune.errors import ConfigError, Problem
from gracetune.seeded_random import uniform

FloatArray = npt.NDArray[np.float64]
NoiseRange = tuple[float, float]
"""A noise range: lowest level, and the first one above it. An upper end of 1 is included."""

Bias = Literal["balanced", "content", "style"]
_NORMAL = NormalDist()
_LEAST_MASS = 1e-9
"""The least probability of a noise range. One with less would repeat the same few levels, or contain none."""
_BELOW_ONE = 1.0 - 2.0**-53
"""The largest float64 below 1."""
_ABOVE_ZERO = 2.0**-54
_STEPS = 1000
"""Number of ai-toolkit's steps."""


class ShiftRule(Protocol):
    """The shift for an image of this many tokens (`models.common.flow_shift.ResolutionShift`)."""

    def at(self, tokens: int) -> float: ...


@dataclass(frozen=True)
class Uniform:
    """Every level is equally likely."""

    def quantile(self, share: float) -> float:
        return share

    def share_below(self, level: float) -> float:
        return level


@dataclass(frozen=True)
class LogitNormal:
    """The distribution of 1 / (1 + exp(-scale z)) for a standard normal z."""

    scale: float = 1.0

    def quantile(self, share: float) -> float:
        z = self.scale * _NORMAL.inv_cdf(share)
        return 1.0 / (1.0 + math.exp(-z)) if z > 0 else math.exp(z) / (1.0 + math.exp(z))

    def share_below(self, level: float) -> float:
        if level <= 0 or level >= 1:
            return min(1.0, max(0.0, level))
        z = (math.log(level) - math.log1p(-level)) / self.scale
        return 0.5 * math.erfc(-z / math.sqrt(2.0))


@dataclass(frozen=True)
class Beta:
    """The beta distribution over levels."""

    alpha: float = 2.0
    beta: float = 2.0

    def quantile(self, share: float) -> float:
        return beta_quantile(share, self.alpha, self.beta)

    def share_below(self, level: float) -> float:
        return beta_cdf(level, self.alpha, self.beta)


Distribution = Uniform | LogitNormal | Beta
"""`quantile` gives the level below which a share of all samples lies; `share_below` is its inverse."""


def _open_interval(share: float) -> float:
    """Clamp into the open interval (0, 1), where every distribution has a quantile."""
    return min(max(share, _ABOVE_ZERO), _BELOW_ONE)


def biased(share: float, bias: Bias) -> float:
    """Bias a uniform random number."""
    if bias == "content":
        return 1.0 - (1.0 - share) ** 3
    return share**3 if bias == "style" else share


def unbiased(share: float, bias: Bias) -> float:
    """The inverse of `biased`."""
    if bias == "content":
        return float(1.0 - np.cbrt(1.0 - share))
    return float(np.cbrt(share)) if bias == "style" else share


def shifted(level: float, shift: float) -> float:
    """The flow shift of a level."""
    return shift * level / (1.0 + (shift - 1.0) * level)


def unshifted(level: float, shift: float) -> float:
    """The inverse of `shifted`."""
    return shifted(level, 1.0 / shift)


def stretched(level: float, terminal: float) -> float:
    """Map [0, 1] linearly to [terminal, 1]."""
    return 1.0 - (1.0 - terminal) * (1.0 - level)


def unstretched(level: float, terminal: float) -> float:
    """The inverse of `stretched`; 0 for levels below `terminal`."""
    return max(0.0, 1.0 - (1.0 - level) / (1.0 - terminal))


@dataclass(frozen=True)
class LevelSampler:
    """`level(seed, index)` is the noise level of one sample, exactly representable in float32."""

    distribution: Distribution
    bias: Bias = "balanced"
    shift: float | ShiftRule = 1.0
    """A number, or a rule that computes it from an image's tokens."""
    noise_range: NoiseRange = (0.0, 1.0)
    """The noise range to train."""
    steps: int | None = None
    """Number of discrete steps of a DDPM model; None for continuous levels."""
    always: float | None = None
    """A fixed level for every sample, which overrides everything else."""
    biased_range: bool = False
    """Whether the bias applies within the noise range instead of to the whole distribution."""
    terminal: float = 0.0
    """The lowest level after the shift."""
    stratified: bool = False
    span: NoiseRange = (0.0, 1.0)
    """The noise range of the expert. `noise_range` is all or part of it."""

    @classmethod
    def from_config(
        cls,
        objective: Objective,
        schedule: NoiseSchedule,
        *,
        shift: float = 1.0,
        rule: ShiftRule | None = None,
        noise_range: NoiseRange = (0.0, 1.0),
    ) -> LevelSampler:
        """`shift` and `rule` are the model's own (`ModelFacts.shift`, `details["resolution_shift"]`). `noise_range` is
        the noise range of the trained expert."""
        sampler = cls(
            _distribution(objective),
            bias=objective.timestep_bias,
            shift=_shift(objective, schedule, shift, rule),
            noise_range=_narrowed(objective, noise_range),
            steps=len(schedule.alphas_cumprod) if isinstance(schedule, Ddpm) else None,
            always=1.0 if objective.timesteps == "one_step" else None,
            biased_range=objective.timestep_bias_over == "noise_range",
            terminal=objective.shift_terminal,
            stratified=objective.stratified,
            span=noise_range,
        )
        sampler._check()
        return sampler

    def level(self, seed: int, index: int, tokens: int | None = None) -> float:
        """`tokens` is the number of image tokens of the sample, needed only for a resolution-dependent shift."""
        return self.quantile(uniform(seed, "level", index), tokens)

    def levels(self, seed: int, indices: Sequence[int], tokens: int | None = None) -> list[float]:
        """The noise levels of a batch, whose images all have the same number of tokens."""
        if not self.stratified:
            return [self.level(seed, index, tokens) for index in indices]
        # Sample 0 gets the noisiest stratum.
        strata = enumerate(reversed(range(len(indices))))
        shares = [(stratum + uniform(seed, "level", indices[at])) / len(indices) for at, stratum in strata]
        return [self.quantile(share, tokens) for share in shares]

    def quantile(self, share: float, tokens: int | None = None) -> float:
        """The level for the uniform random number `share`: this share of all samples has a lower level."""
        if self.always is not None:
            return self.always
        shift = self._shift_for(tokens)
        first, last = (self._share_below(bound, shift) for bound in self.noise_range)
        if self._picks_random:
            share = self._pick(share, first, last, shift)
        elif self.biased_range and self.bias != "balanced":
            share = self._step(first + (last - first) * biased(share, self.bias))
        else:
            share = biased(_open_interval(first + (last - first) * share), self.bias)
        level = shifted(self.distribution.quantile(share), shift)
        return self._in_range(stretched(level, self.terminal) if self.terminal else level)

    @property
    def _picks_random(self) -> bool:
        return self.biased_range and self.bias != "balanced" and not isinstance(self.distribution, Uniform)

    def _step(self, share: float) -> float:
        """Round up to one of 1000 steps (to its middle for models with discrete steps, so that it stays inside)."""
        end = 1.0 if self.steps is None else 0.5
        return _open_interval((math.floor(_open_interval(share) * _STEPS) + end) / _STEPS)

    def _pick(self, share: float, first: float, last: float, shift: float) -> float:
        """ai-toolkit's biased pick from 1000 random levels in order, restricted to the expert's.

        In ai-toolkit the low-noise expert's levels start one too early, so they include the lowest of the other expert.
        """
        lowest, highest = (self._share_below(bound, shift) for bound in self.span)
        mass = highest - lowest
        number = max(2, round(_STEPS * mass))
        begin, end = (min(number - 1, round(number * (highest - bound) / mass)) for bound in (last, first))
        above = round(_STEPS * (1 - highest))
        positions, below = _picked(number, -1 if above and begin == 0 else begin, end, self.bias)
        own = float(below[-1])
        if share <= own or not above:
            return _open_interval(lowest + mass * float(np.interp(share, below, positions)))
        # Index -1 is the lowest of the other expert's `above` levels. The minimum of n uniform numbers has the
        # distribution function 1 - (1 - x)^n, which is inverted here.
        return _open_interval(highest + (1 - highest) * (1 - ((1 - share) / (1 - own)) ** (1 / above)))

    def _shift_for(self, tokens: int | None) -> float:
        if isinstance(self.shift, float | int):
            return float(self.shift)
        if tokens is None:
            raise ValueError("a resolution-dependent shift needs the number of image tokens")
        return self.shift.at(tokens)

    def _share_below(self, level: float, shift: float) -> float:
        """The share of uniform random numbers that map below `level`: the inverse of `quantile` without the range."""
        if level <= 0 or level >= 1:
            return min(1.0, max(0.0, level))
        level = unstretched(level, self.terminal) if self.terminal else level
        share = self.distribution.share_below(unshifted(level, shift))
        return share if self.biased_range and self.bias != "balanced" else unbiased(share, self.bias)

    def _in_range(self, level: float) -> float:
        """Round to float32, or to a step, without leaving the noise range."""
        lowest, highest = self.noise_range
        if self.steps is not None:
            # A step belongs to the range if its start does: [0, 1) has the steps 0 … T - 1.
            first = math.ceil(lowest * self.steps - 1e-6)
            last = max(first, math.ceil(highest * self.steps - 1e-6) - 1)
            step = min(max(math.floor(level * self.steps), first), last)
            return float(np.float32((step + 1) / self.steps))
        if self._picks_random:  # the levels are random, so the range is only met on average
            return float(np.float32(level))
        return float(min(max(np.float32(level), smallest_from(lowest)), largest_below(highest)))

    def _check(self) -> None:
        """Reject a noise range that the distribution does not reach, before it produces wrong levels."""
        lowest, highest = self.noise_range
        if self.always is not None:
            if not lowest <= self.always or (self.always >= highest and highest < 1):
                raise _no_levels(self.noise_range, f"every level is {self.always:g}", "objective.timesteps")
            return
        # A resolution-dependent shift moves the distribution, so check it for the smallest and largest usual images.
        shifts = [self._shift_for(tokens) for tokens in (256, 16384)]
        held = min(self._share_below(highest, shift) - self._share_below(lowest, shift) for shift in shifts)
        if held < _LEAST_MASS:
            raise _no_levels(self.noise_range, f"{max(0.0, held):.1g} of all samples fall there", "objective.timesteps")


@lru_cache(maxsize=32)
def _picked(count: int, begin: int, end: int, bias: Bias) -> tuple[FloatArray, FloatArray]:
    """The distribution of a biased pick among `count` uniform random numbers, sorted in descending order.

    The bias picks the number of an index from `begin` to `end`; index -1 lies above all of them. Returns positions in
    (0, 1), and the probability that the picked number is below each.
    """
    indices = np.arange(count + 1)
    cut = np.clip((indices - begin) / max(1, end - begin) * (1 - 1 / _STEPS), 0.0, 1.0)
    picked_from = 1.0 - np.cbrt(cut) if bias == "content" else np.cbrt(1.0 - cut)
    picked_from[: max(0, begin + 1)], picked_from[end + 1 :] = 1.0, 0.0
    # The number of index j is below a position if at most j numbers are above it; that count is binomial.
    positions = np.array([_NORMAL.cdf(z) for z in np.linspace(-6.0, 6.0, 2001)])
    choose = np.concatenate([[0.0], np.cumsum(np.log(np.arange(count, 0, -1)) - np.log(np.arange(1, count + 1)))])
    above = np.exp(choose + np.outer(np.log(positions), indices[::-1]) + np.outer(np.log1p(-positions), indices))
    below = np.maximum.accumulate(above @ picked_from)
    return positions, below


def _no_levels(noise_range: NoiseRange, found: str, key: str) -> ConfigError:
    expected = f"a distribution that reaches noise levels from {noise_range[0]:g} to {noise_range[1]:g}"
    return ConfigError([Problem(key, found, expected, "--set objective.timesteps=uniform")])


def _distribution(objective: Objective) -> Distribution:
    match objective.timesteps:
        case "sigmoid" | "logit_normal":
            return LogitNormal(objective.sigmoid_scale)
        case "beta":
            return Beta(objective.beta_alpha, objective.beta_beta)
        case _:
            return Uniform()


def _shift(objective: Objective, schedule: NoiseSchedule, family: float, rule: ShiftRule | None) -> float | ShiftRule:
    """The config's flow shift, or the family's own. ConfigError if the model does not support it."""
    shift, key = objective.flow_shift, "objective.flow_shift"
    if schedule.prediction != "flow":
        if shift not in (None, 1.0):
            expected = f"no value: this model predicts {schedule.prediction}, and only flow matching has a shift"
            raise ConfigError([Problem(key, str(shift), expected, "remove objective.flow_shift")])
        if objective.shift_terminal:
            expected = f"0: this model predicts {schedule.prediction}, and only flow matching has a shift"
            found = f"{objective.shift_terminal:g}"
            raise ConfigError([Problem("objective.shift_terminal", found, expected, "remove objective.shift_terminal")])
        return 1.0
    if shift == "resolution":
        if rule is None:
            expected = "a number: this model's scheduler has no resolution-dependent shift"
            raise ConfigError([Problem(key, shift, expected, f"--set objective.flow_shift={family:g}")])
        return rule
    if shift is not None:
        return shift
    # Weights by level average 1 only over uniform levels, so the family's shift does not apply by default.
    return 1.0 if objective.timesteps == "weighted" or objective.timestep_weights is not None else family


def _narrowed(objective: Objective, noise_range: NoiseRange) -> NoiseRange:
    """The part of the expert's noise range between the config's timesteps."""
    lowest = max(noise_range[0], objective.min_timestep / 1000)
    highest = min(noise_range[1], objective.max_timestep / 1000)
    if lowest >= highest:
        found = f"min_timestep {objective.min_timestep}, max_timestep {objective.max_timestep}"
        expected = f"timesteps inside this expert's noise range, {1000 * noise_range[0]:g} to {1000 * noise_range[1]:g}"
        hint = "widen them, or train only the other expert (model.experts)"
        raise ConfigError([Problem("objective.min_timestep", found, expected, hint)])
    return lowest, highest


def largest_below(bound: float) -> np.float32:
    """The largest float32 that is below a bound however the two are compared: as float64, as float32, or as timesteps
    in either. A bound of 1 is the end of the noise, where no other expert begins, and is returned itself."""
    if bound >= 1:
        return np.float32(1.0)
    level = np.float32(bound)
    thousand = np.float32(1000)
    # Timesteps in float32 are the coarsest. A level below the bound in both of these is below it in all comparisons.
    while not (level * thousand < np.float32(bound) * thousand and level * thousand < np.float32(bound * 1000)):
        level = np.nextafter(level, np.float32(-1))
    return level


def smallest_from(bound: float) -> np.float32:
    """The smallest float32 that is not below a bound. As a float32 timestep it is not below the bound's either."""
    level = np.float32(bound)
    while float(level) < bound:
        level = np.nextafter(level, np.float32(2))
    return level
