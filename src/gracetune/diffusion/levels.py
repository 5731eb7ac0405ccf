"""Which noise level a sample is learnt at: a pure function of the seed and the sample's number.

One uniform draw v goes through increasing functions only, so their composition has an inverse, and "only levels of
this window" is a narrower range of v rather than a rejected draw:

    bias(v)     balanced v · content 1 - (1 - v)^3, towards noise · style v^3, towards the picture
    quantile    uniform, shift, weighted: itself · sigmoid, logit_normal: 1 / (1 + exp(-scale z(v))) · beta
    shift(u)    s u / (1 + (s - 1) u), then 1 - (1 - t) (1 - u) with t = `shift_terminal`; flow matching only

u = shift(quantile(bias(v))). `one_step` is always pure noise. `content` has the distribution of 1 - v^3.
With `timestep_bias_over: noise_range` the window is taken first, as in ai-toolkit, whose bias picks one of 1000 steps,
for a tenth of all samples the very last one: u = shift(quantile(step(window(bias(v))))). Its other distributions are
1000 random levels in order, new for every batch, so that a step is spread over levels (`_picked`).
With `stratified` the draw of a batch's sample i of n (from 0) is (n - 1 - i + v) / n.
A model with a table of whole steps learns at the level of the step that u falls into.
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
Window = tuple[float, float]
"""Noise levels from the first, up to but without the second; an end of 1 is included."""

Bias = Literal["balanced", "content", "style"]
_NORMAL = NormalDist()
_LEAST_MASS = 1e-9
"""A window that holds less of the distribution would repeat the same few levels, or none."""
_BELOW_ONE = 1.0 - 2.0**-53
_ABOVE_ZERO = 2.0**-54
_STEPS = 1000


class ShiftRule(Protocol):
    """How far levels are shifted for a picture of so many tokens (`models.common.flow_shift.ResolutionShift`)."""

    def at(self, tokens: int) -> float: ...


@dataclass(frozen=True)
class Uniform:
    def quantile(self, share: float) -> float:
        return share

    def share_below(self, level: float) -> float:
        return level


@dataclass(frozen=True)
class LogitNormal:
    """1 / (1 + exp(-scale z)) of a standard normal z."""

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
    alpha: float = 2.0
    beta: float = 2.0

    def quantile(self, share: float) -> float:
        return beta_quantile(share, self.alpha, self.beta)

    def share_below(self, level: float) -> float:
        return beta_cdf(level, self.alpha, self.beta)


Distribution = Uniform | LogitNormal | Beta


def _inside(share: float) -> float:
    """Above 0 and below 1, where every distribution has a quantile."""
    return min(max(share, _ABOVE_ZERO), _BELOW_ONE)


def biased(share: float, bias: Bias) -> float:
    if bias == "content":
        return 1.0 - (1.0 - share) ** 3
    return share**3 if bias == "style" else share


def unbiased(share: float, bias: Bias) -> float:
    if bias == "content":
        return float(1.0 - np.cbrt(1.0 - share))
    return float(np.cbrt(share)) if bias == "style" else share


def shifted(level: float, shift: float) -> float:
    return shift * level / (1.0 + (shift - 1.0) * level)


def unshifted(level: float, shift: float) -> float:
    return shifted(level, 1.0 / shift)


def stretched(level: float, terminal: float) -> float:
    """[0, 1] compressed into [terminal, 1]."""
    return 1.0 - (1.0 - terminal) * (1.0 - level)


def unstretched(level: float, terminal: float) -> float:
    """The inverse; 0 for what is below `terminal`."""
    return max(0.0, 1.0 - (1.0 - level) / (1.0 - terminal))


@dataclass(frozen=True)
class LevelSampler:
    """`level(seed, index)`: the noise level of one sample, exactly a float32."""

    distribution: Distribution
    bias: Bias = "balanced"
    shift: float | ShiftRule = 1.0
    """A number, or the rule that makes one of a picture's tokens."""
    window: Window = (0.0, 1.0)
    steps: int | None = None
    """Of a model that knows whole steps only."""
    always: float | None = None
    """The level of every sample, whatever else is said."""
    biased_window: bool = False
    """The bias is over the window's part of the distribution, not over the whole."""
    terminal: float = 0.0
    """The lowest level after the shift."""
    stratified: bool = False
    span: Window = (0.0, 1.0)
    """The expert's noise levels, of which `window` is all or a part."""

    @classmethod
    def from_config(
        cls,
        objective: Objective,
        schedule: NoiseSchedule,
        *,
        shift: float = 1.0,
        rule: ShiftRule | None = None,
        window: Window = (0.0, 1.0),
    ) -> LevelSampler:
        """`shift` is the family's own (`ModelFacts.shift`), `rule` its rule by resolution where it has one
        (`details["resolution_shift"]`), `window` the noise levels of the expert that is trained."""
        sampler = cls(
            _distribution(objective),
            objective.timestep_bias,
            _shift(objective, schedule, shift, rule),
            _narrowed(objective, window),
            len(schedule.alphas_cumprod) if isinstance(schedule, Ddpm) else None,
            1.0 if objective.timesteps == "one_step" else None,
            objective.timestep_bias_over == "noise_range",
            objective.shift_terminal,
            objective.stratified,
            window,
        )
        sampler._check()
        return sampler

    def level(self, seed: int, index: int, tokens: int | None = None) -> float:
        """`tokens` are those of this sample's picture; only a shift by resolution asks for them."""
        return self.quantile(uniform(seed, "level", index), tokens)

    def levels(self, seed: int, indices: Sequence[int], tokens: int | None = None) -> list[float]:
        """Of a batch; all its pictures have as many tokens."""
        if not self.stratified:
            return [self.level(seed, index, tokens) for index in indices]
        parts = enumerate(reversed(range(len(indices))))
        shares = [(part + uniform(seed, "level", indices[at])) / len(indices) for at, part in parts]
        return [self.quantile(share, tokens) for share in shares]

    def quantile(self, share: float, tokens: int | None = None) -> float:
        """The level below which this share of all samples is."""
        if self.always is not None:
            return self.always
        shift = self._shift_for(tokens)
        first, last = (self._share_below(bound, shift) for bound in self.window)
        if self._picks_random:
            share = self._pick(share, first, last, shift)
        elif self.biased_window and self.bias != "balanced":
            share = self._step(first + (last - first) * biased(share, self.bias))
        else:
            share = biased(_inside(first + (last - first) * share), self.bias)
        level = shifted(self.distribution.quantile(share), shift)
        return self._in_window(stretched(level, self.terminal) if self.terminal else level)

    @property
    def _picks_random(self) -> bool:
        return self.biased_window and self.bias != "balanced" and not isinstance(self.distribution, Uniform)

    def _step(self, share: float) -> float:
        """The noisier end of one of 1000 steps (its middle, where a model has steps of its own)."""
        end = 1.0 if self.steps is None else 0.5
        return _inside((math.floor(_inside(share) * _STEPS) + end) / _STEPS)

    def _pick(self, share: float, first: float, last: float, shift: float) -> float:
        """The bias picks one of the expert's random levels, 1000 of the whole distribution. Those of an expert for less
        noise begin one too early in ai-toolkit: the lowest of the other expert's is among them."""
        lowest, highest = (self._share_below(bound, shift) for bound in self.span)
        mass = highest - lowest
        draws = max(2, round(_STEPS * mass))
        begin, end = (min(draws - 1, round(draws * (highest - bound) / mass)) for bound in (last, first))
        above = round(_STEPS * (1 - highest))
        positions, below = _picked(draws, -1 if above and begin == 0 else begin, end, self.bias)
        own = float(below[-1])
        if share <= own or not above:
            return _inside(lowest + mass * float(np.interp(share, below, positions)))
        return _inside(highest + (1 - highest) * (1 - ((1 - share) / (1 - own)) ** (1 / above)))

    def _shift_for(self, tokens: int | None) -> float:
        if isinstance(self.shift, float | int):
            return float(self.shift)
        if tokens is None:
            raise ValueError("a shift by resolution needs the number of a picture's tokens")
        return self.shift.at(tokens)

    def _share_below(self, level: float, shift: float) -> float:
        if level <= 0 or level >= 1:
            return min(1.0, max(0.0, level))
        level = unstretched(level, self.terminal) if self.terminal else level
        share = self.distribution.share_below(unshifted(level, shift))
        return share if self.biased_window and self.bias != "balanced" else unbiased(share, self.bias)

    def _in_window(self, level: float) -> float:
        lowest, highest = self.window
        if self.steps is not None:
            # A step belongs to the window if its beginning does: [0, 1) are the steps 0 … T - 1.
            first = math.ceil(lowest * self.steps - 1e-6)
            last = max(first, math.ceil(highest * self.steps - 1e-6) - 1)
            step = min(max(math.floor(level * self.steps), first), last)
            return float(np.float32((step + 1) / self.steps))
        if self._picks_random:  # which levels a window has is random there
            return float(np.float32(level))
        return float(min(max(np.float32(level), smallest_from(lowest)), largest_below(highest)))

    def _check(self) -> None:
        """A window in which nothing can be drawn is an error now, not a wrong level later."""
        lowest, highest = self.window
        if self.always is not None:
            if not lowest <= self.always or (self.always >= highest and highest < 1):
                raise _no_levels(self.window, f"all of them are at {self.always:g}", "objective.timesteps")
            return
        # A shift by resolution moves the mass with the picture's size; both ends of what pictures have are asked.
        shifts = [self._shift_for(tokens) for tokens in (256, 16384)]
        held = min(self._share_below(highest, shift) - self._share_below(lowest, shift) for shift in shifts)
        if held < _LEAST_MASS:
            raise _no_levels(self.window, f"{max(0.0, held):.1g} of all draws fall there", "objective.timesteps")


@lru_cache(maxsize=32)
def _picked(draws: int, begin: int, end: int, bias: Bias) -> tuple[FloatArray, FloatArray]:
    """Of so many uniform random numbers in falling order, the bias picks one from `begin` to `end`. Positions, and the
    probability that the one picked is below each. Number -1 is above all of them."""
    numbers = np.arange(draws + 1)
    cut = np.clip((numbers - begin) / max(1, end - begin) * (1 - 1 / _STEPS), 0.0, 1.0)
    picked_from = 1.0 - np.cbrt(cut) if bias == "content" else np.cbrt(1.0 - cut)
    picked_from[: max(0, begin + 1)], picked_from[end + 1 :] = 1.0, 0.0
    # The one with number j is below a position if at most j are above it; how many are above is binomial.
    positions = np.array([_NORMAL.cdf(z) for z in np.linspace(-6.0, 6.0, 2001)])
    choose = np.concatenate([[0.0], np.cumsum(np.log(np.arange(draws, 0, -1)) - np.log(np.arange(1, draws + 1)))])
    above = np.exp(choose + np.outer(np.log(positions), numbers[::-1]) + np.outer(np.log1p(-positions), numbers))
    below = np.maximum.accumulate(above @ picked_from)
    return positions, below


def _no_levels(window: Window, found: str, key: str) -> ConfigError:
    asked = f"noise levels from {window[0]:g} to {window[1]:g}"
    return ConfigError(
        [Problem(key, found, f"a distribution that reaches {asked}", "write `timesteps: uniform` in `objective`")]
    )


def _distribution(objective: Objective) -> Distribution:
    match objective.timesteps:
        case "sigmoid" | "logit_normal":
            return LogitNormal(objective.sigmoid_scale)
        case "beta":
            return Beta(objective.beta_alpha, objective.beta_beta)
        case _:
            return Uniform()


def _shift(objective: Objective, schedule: NoiseSchedule, family: float, rule: ShiftRule | None) -> float | ShiftRule:
    asked, key = objective.flow_shift, "objective.flow_shift"
    if schedule.prediction != "flow":
        if asked not in (None, 1.0):
            expected = f"nothing: this model learns by {schedule.prediction}, and only flow matching shifts its levels"
            raise ConfigError([Problem(key, str(asked), expected, "remove flow_shift")])
        if objective.shift_terminal:
            expected = f"0: this model learns by {schedule.prediction}, and only flow matching has one"
            found = f"{objective.shift_terminal:g}"
            raise ConfigError([Problem("objective.shift_terminal", found, expected, "remove shift_terminal")])
        return 1.0
    if asked == "resolution":
        if rule is None:
            expected = "a number: this model's scheduler has no rule by resolution"
            raise ConfigError([Problem(key, asked, expected, f"write `flow_shift: {family:g}`, the model's own")])
        return rule
    if asked is not None:
        return asked
    # Weights by level mean 1 over uniform levels; a shift no one asked for would bend them.
    return 1.0 if objective.timesteps == "weighted" or objective.timestep_weights is not None else family


def _narrowed(objective: Objective, window: Window) -> Window:
    lowest = max(window[0], objective.min_timestep / 1000)
    highest = min(window[1], objective.max_timestep / 1000)
    if lowest >= highest:
        asked = f"min_timestep {objective.min_timestep}, max_timestep {objective.max_timestep}"
        expected = f"timesteps inside this expert's window, {1000 * window[0]:g} to {1000 * window[1]:g}"
        hint = "widen them, or train the other expert only (`experts` in `model`)"
        raise ConfigError([Problem("objective.min_timestep", asked, expected, hint)])
    return lowest, highest


def largest_below(bound: float) -> np.float32:
    """The last float32 that is below a bound however the two are compared: as float64, as float32, or as timesteps
    in either. 1 itself is the end of the noise, where no other expert begins."""
    if bound >= 1:
        return np.float32(1.0)
    level = np.float32(bound)
    thousand = np.float32(1000)
    # Timesteps in float32 are the coarsest: what is below as both of them is below as everything else.
    while not (level * thousand < np.float32(bound) * thousand and level * thousand < np.float32(bound * 1000)):
        level = np.nextafter(level, np.float32(-1))
    return level


def smallest_from(bound: float) -> np.float32:
    """The first float32 that is not below a bound. Rounded further, to a timestep, it is not below the bound's."""
    level = np.float32(bound)
    while float(level) < bound:
        level = np.nextafter(level, np.float32(2))
    return level
