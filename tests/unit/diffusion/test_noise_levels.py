from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gracetune.config.run_config import Objective
from gracetune.diffusion.beta import beta_cdf, beta_quantile
from gracetune.diffusion.noise_levels import (
    Beta,
    Distribution,
    LevelSampler,
    LogitNormal,
    NoiseRange,
    Uniform,
    biased,
    largest_below,
    shifted,
    smallest_from,
    unbiased,
    unshifted,
)
from gracetune.diffusion.schedule import Cosine, Ddpm, Flow
from gracetune.errors import ConfigError
from gracetune.models.common.flow_shift import ResolutionShift
from gracetune.models.experts import noise_range_of
from gracetune.models.spec import Expert, ModelFacts
from unit.models.expert_levels import expert_at

RULE = ResolutionShift(256, 0.5, 4096, 1.15)
TABLE = Ddpm(tuple(float(kept) for kept in np.linspace(0.999, 0.005, 1000)))
KINDS = ("uniform", "sigmoid", "logit_normal", "beta", "shift", "weighted")
DRAWS = 4000
CLOSE = (0.9081128851953352, 0.28183784439970383)
"""Bounds whose next lower float32 has the bound's own timestep, in one of the two ways to compute it."""


def objective(**changes: object) -> Objective:
    return Objective.model_validate(changes)


def furthest(levels: list[float], share_below: Callable[[float], float]) -> float:
    """The Kolmogorov-Smirnov distance of the samples from the true distribution."""
    ordered = sorted(levels)
    return max(
        max(abs(share_below(level) - at / len(ordered)), abs(share_below(level) - (at + 1) / len(ordered)))
        for at, level in enumerate(ordered)
    )


LIMIT = 1.63 / math.sqrt(DRAWS)
"""The critical distance at a significance of 1 %. The samples below are always the same."""


def true_share(requested: Objective, shift: float, level: float) -> float:
    """The distributions by definition, independent of the code under test."""
    level = level / (shift - (shift - 1) * level)
    share = level
    if requested.timesteps in ("sigmoid", "logit_normal"):
        if not 0 < level < 1:
            share = float(level >= 1)
        else:
            share = 0.5 * (1 + math.erf(math.log(level / (1 - level)) / requested.sigmoid_scale / math.sqrt(2)))
    if requested.timesteps == "beta":
        assert (requested.beta_alpha, requested.beta_beta) == (2.0, 2.0)
        share = level * level * (3 - 2 * level)
    if requested.timestep_bias == "style":  # level of u^3: P(u^3 < x) = x^(1/3)
        return share ** (1 / 3)
    if requested.timestep_bias == "content":  # level of 1 - u^3: P(1 - u^3 < x) = 1 - (1 - x)^(1/3)
        return 1 - (1 - share) ** (1 / 3)
    return share


class TestDistributions:
    @pytest.mark.parametrize("bias", ["balanced", "content", "style"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shift", [1.0, 3.0])
    def test_match_their_definitions(self, kind: str, bias: str, shift: float) -> None:
        requested = objective(timesteps=kind, timestep_bias=bias, flow_shift=shift, sigmoid_scale=1.3)
        levels = LevelSampler.from_config(requested, Flow()).levels(42, range(DRAWS))
        assert furthest(levels, lambda level: true_share(requested, shift, level)) < LIMIT

    @pytest.mark.parametrize("bias", ["balanced", "content", "style"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("noise_range", [(0.875, 1.0), (0.0, 0.875), (0.3, 0.6)])
    def test_in_a_noise_range_are_the_conditional_distributions(
        self, kind: str, bias: str, noise_range: NoiseRange
    ) -> None:
        requested = objective(timesteps=kind, timestep_bias=bias, flow_shift=5.0)
        levels = LevelSampler.from_config(requested, Flow(), noise_range=noise_range).levels(7, range(DRAWS))
        first, last = (true_share(requested, 5.0, bound) for bound in noise_range)
        share = furthest(levels, lambda level: (true_share(requested, 5.0, level) - first) / (last - first))
        assert share < LIMIT

    def test_wrong_distributions_are_detected(self) -> None:
        """The check above can fail: the same samples against another distribution."""
        levels = LevelSampler(LogitNormal()).levels(42, range(DRAWS))
        assert furthest(levels, LogitNormal(1.2).share_below) > LIMIT
        assert furthest(levels, Uniform().share_below) > LIMIT

    def test_content_favours_noise_and_style_favours_the_image(self) -> None:
        means = {
            bias: np.mean(LevelSampler(Uniform(), bias).levels(0, range(DRAWS)))  # type: ignore[arg-type]
            for bias in ("style", "balanced", "content")
        }
        assert means["style"] == pytest.approx(0.25, abs=0.02)
        assert means["balanced"] == pytest.approx(0.5, abs=0.02)
        assert means["content"] == pytest.approx(0.75, abs=0.02)

    def test_one_step_is_pure_noise(self) -> None:
        sampler = LevelSampler.from_config(objective(timesteps="one_step"), Flow(), shift=3.0)
        assert set(sampler.levels(0, range(50))) == {1.0}


class TestPartsOfABatch:
    def test_each_sample_has_its_own_stratum(self) -> None:
        sampler = LevelSampler(Uniform(), stratified=True)
        for first in range(0, 400, 4):
            levels = sampler.levels(5, range(first, first + 4))
            assert [math.floor(4 * level) for level in levels] == [3, 2, 1, 0]

    def test_distribution_is_the_same_without_strata(self) -> None:
        sampler = LevelSampler(LogitNormal(), shift=3.0, stratified=True)
        levels = [level for first in range(0, DRAWS, 4) for level in sampler.levels(5, range(first, first + 4))]
        requested = objective(timesteps="sigmoid", flow_shift=3.0)
        assert furthest(levels, lambda level: true_share(requested, 3.0, level)) < LIMIT


class TestTerminal:
    def test_levels_are_compressed_above_it(self) -> None:
        requested = objective(timesteps="uniform", flow_shift=2.0, shift_terminal=0.2)
        sampler = LevelSampler.from_config(requested, Flow())
        plain = LevelSampler.from_config(objective(timesteps="uniform", flow_shift=2.0), Flow())
        levels = sampler.levels(1, range(200))
        assert min(levels) >= 0.2
        expected = [0.2 + 0.8 * level for level in plain.levels(1, range(200))]
        assert levels == pytest.approx(expected, abs=1e-6)

    def test_is_for_flow_matching_only(self) -> None:
        with pytest.raises(ConfigError, match=r"remove objective\.shift_terminal"):
            LevelSampler.from_config(objective(shift_terminal=0.02), TABLE)


class TestDraws:
    def test_depend_only_on_the_seed_and_the_sample(self) -> None:
        sampler = LevelSampler(LogitNormal())
        whole = sampler.levels(1, range(20))
        assert [sampler.level(1, index) for index in reversed(range(20))] == whole[::-1]
        assert sampler.levels(1, [3, 17]) == [whole[3], whole[17]]
        assert sampler.levels(2, range(20)) != whole
        assert len(set(whole)) == 20

    def test_are_pinned(self) -> None:
        """Resumed and compared runs need the same levels in every release."""
        sampler = LevelSampler.from_config(objective(), Flow(), shift=3.0)
        assert sampler.levels(42, range(3)) == PINNED

    def test_share_their_quantile_between_experts(self) -> None:
        """One random number has the same quantile in both noise ranges."""
        high, low = LevelSampler(Uniform(), noise_range=(0.5, 1.0)), LevelSampler(Uniform(), noise_range=(0.0, 0.5))
        for index in range(50):
            assert high.level(0, index) - 0.5 == pytest.approx(low.level(0, index), abs=1e-6)


@st.composite
def samplers(draw: st.DrawFn) -> LevelSampler:
    distribution: Distribution = draw(
        st.one_of(
            st.just(Uniform()),
            st.builds(LogitNormal, st.floats(0.3, 3)),
            st.builds(Beta, st.floats(0.3, 8), st.floats(0.3, 8)),
        )
    )
    bounds = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    assume(bounds[1] - bounds[0] > 1e-3)
    bias, shift = draw(st.sampled_from(["balanced", "content", "style"])), draw(st.floats(0.2, 12))
    sampler = LevelSampler(
        distribution, bias, shift, (bounds[0], bounds[1]), biased_range=draw(st.booleans()),
        terminal=draw(st.sampled_from([0.0, 0.02, 0.3])),
    )  # fmt: skip
    try:
        sampler._check()
    except ConfigError:
        assume(False)
    return sampler


class TestNoiseRanges:
    @given(samplers(), st.integers(0, 2**40), st.integers(0, 2**62))
    def test_are_never_left(self, sampler: LevelSampler, seed: int, index: int) -> None:
        picks_random = sampler.biased_range and sampler.bias != "balanced" and sampler.distribution != Uniform()
        lowest, highest = (
            (0.0, 1.0) if picks_random else sampler.noise_range
        )  # a range of random levels has no fixed ends
        level = sampler.level(seed, index)
        assert level == float(np.float32(level))
        assert lowest <= level <= highest
        assert level < highest or highest == 1.0

    @pytest.mark.parametrize("boundary", [0.875, 0.9, 0.1, 1 / 3, 0.7, 0.417, 0.999, *CLOSE])
    @pytest.mark.parametrize("share", [0.0, 1 - 2**-53])
    def test_ends_belong_to_the_right_expert(
        self, boundary: float, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Random numbers at the very ends, compared as float64, as float32, and as timesteps of both."""
        experts = (Expert("high_noise", "a", lowest=boundary), Expert("low_noise", "b", highest=boundary))
        facts = ModelFacts("wan", "x", experts, Flow())
        monkeypatch.setattr("gracetune.diffusion.noise_levels.uniform", lambda *_parts: share)
        for expert in experts:
            for distribution in (Uniform(), LogitNormal(), Beta()):
                sampler = LevelSampler(distribution, shift=5.0, noise_range=noise_range_of(expert.name, facts))
                level = sampler.level(0, 0)
                is_high = expert.name == "high_noise"
                on_device = torch.tensor([level], dtype=torch.float32)
                assert (level >= boundary) is is_high
                assert (level * 1000 >= boundary * 1000) is is_high
                assert bool(on_device >= boundary) is is_high
                assert bool(on_device >= torch.tensor(boundary)) is is_high
                assert bool(Flow().model_time(on_device) >= boundary * 1000) is is_high
                assert bool(Flow().model_time(on_device) >= torch.tensor(boundary) * 1000) is is_high
                assert expert_at(level, facts) is expert

    @given(st.floats(0, 1, exclude_max=True))
    def test_bounds_are_the_nearest_float32(self, bound: float) -> None:
        below, first = largest_below(bound), smallest_from(bound)
        assert float(below) < bound <= float(first)
        assert float(first) - float(below) <= 1e-6

    def test_timesteps_narrow_the_window(self) -> None:
        requested = objective(timesteps="uniform", min_timestep=200, max_timestep=500)
        sampler = LevelSampler.from_config(requested, Flow(), noise_range=(0.0, 0.4))
        assert sampler.noise_range == (0.2, 0.4)

    def test_outside_the_experts_range_are_rejected(self) -> None:
        requested = objective(min_timestep=0, max_timestep=500)
        with pytest.raises(ConfigError, match="875 to 1000"):
            LevelSampler.from_config(requested, Flow(), noise_range=(0.875, 1.0))

    def test_without_any_probability_are_rejected(self) -> None:
        with pytest.raises(ConfigError, match=r"--set objective\.timesteps=uniform"):
            LevelSampler.from_config(objective(sigmoid_scale=0.05), Flow(), noise_range=(0.9, 1.0))
        with pytest.raises(ConfigError, match="every level is 1"):
            LevelSampler.from_config(objective(timesteps="one_step"), Flow(), noise_range=(0.0, 0.875))


class TestShift:
    def test_comes_from_the_config_or_the_family(self) -> None:
        def shift(**changes: object) -> object:
            return LevelSampler.from_config(objective(**changes), Flow(), shift=5.0, rule=RULE).shift

        assert shift() == 5.0
        assert shift(flow_shift=2.5) == 2.5
        assert shift(flow_shift="resolution") is RULE
        assert shift(timesteps="weighted") == 1.0
        assert shift(timesteps="weighted", flow_shift=2.0) == 2.0

    def test_by_resolution_follows_the_tokens(self) -> None:
        requested = objective(timesteps="uniform", flow_shift="resolution")
        sampler = LevelSampler.from_config(requested, Flow(), rule=RULE)
        plain = LevelSampler(Uniform())
        for tokens in (256, 1024, 4096):
            expected = shifted(plain.level(3, 9), RULE.at(tokens))
            assert sampler.level(3, 9, tokens) == pytest.approx(expected, abs=1e-6)
        with pytest.raises(ValueError, match="tokens"):
            sampler.level(3, 9)

    def test_by_resolution_needs_a_rule(self) -> None:
        with pytest.raises(ConfigError, match=r"--set objective\.flow_shift=3"):
            LevelSampler.from_config(objective(flow_shift="resolution"), Flow(), shift=3.0)

    @pytest.mark.parametrize("schedule", [TABLE, Cosine()])
    def test_is_for_flows_only(self, schedule: Ddpm | Cosine) -> None:
        assert LevelSampler.from_config(objective(), schedule, shift=3.0).shift == 1.0
        assert LevelSampler.from_config(objective(flow_shift=1.0), schedule).shift == 1.0
        with pytest.raises(ConfigError, match=r"remove objective\.flow_shift"):
            LevelSampler.from_config(objective(flow_shift=3.0), schedule)

    @given(st.floats(0, 1), st.floats(0.05, 20))
    def test_is_invertible_and_keeps_the_ends(self, level: float, shift: float) -> None:
        assert unshifted(shifted(level, shift), shift) == pytest.approx(level, abs=1e-12)
        assert (shifted(0.0, shift), shifted(1.0, shift)) == (0.0, pytest.approx(1.0))

    @given(st.floats(0, 1), st.sampled_from(["balanced", "content", "style"]))
    def test_bias_is_invertible_too(self, share: float, bias: str) -> None:
        assert unbiased(biased(share, bias), bias) == pytest.approx(share, abs=2e-5)  # type: ignore[arg-type]


class TestWholeSteps:
    def test_are_uniform(self) -> None:
        sampler = LevelSampler.from_config(objective(timesteps="uniform"), TABLE)
        steps = TABLE.step(torch.tensor(sampler.levels(0, range(DRAWS))))
        counts = torch.bincount(steps // 100, minlength=10)
        assert steps.min() >= 0
        assert steps.max() <= 999
        assert counts.min() > 0.8 * DRAWS / 10
        assert counts.max() < 1.2 * DRAWS / 10

    @given(st.integers(0, 999), st.integers(1, 1000), st.integers(0, 2**40))
    def test_stay_within_min_and_max(self, low: int, high: int, index: int) -> None:
        assume(low < high)
        requested = objective(timesteps="uniform", min_timestep=low, max_timestep=high)
        level = LevelSampler.from_config(requested, TABLE).level(5, index)
        step = int(TABLE.step(torch.tensor([level])))
        assert low <= step < high

    def test_one_step_is_the_last(self) -> None:
        level = LevelSampler.from_config(objective(timesteps="one_step"), TABLE).level(0, 0)
        assert int(TABLE.step(torch.tensor([level]))) == 999


class TestBeta:
    @given(st.floats(0, 1))
    def test_closed_forms(self, x: float) -> None:
        assert beta_cdf(x, 1, 1) == pytest.approx(x, abs=1e-14)
        assert beta_cdf(x, 2, 2) == pytest.approx(x * x * (3 - 2 * x), abs=1e-14)
        assert beta_cdf(x, 5, 1) == pytest.approx(x**5, abs=1e-14)
        assert beta_cdf(x, 1, 3) == pytest.approx(1 - (1 - x) ** 3, abs=1e-14)
        assert beta_cdf(x, 0.5, 0.5) == pytest.approx(
            2 / math.pi * math.atan2(math.sqrt(x), math.sqrt(1 - x)), abs=1e-12
        )

    @given(st.floats(1e-4, 1 - 1e-4), st.floats(0.1, 30), st.floats(0.1, 30))
    def test_is_mirrored(self, x: float, a: float, b: float) -> None:
        assert beta_cdf(x, a, b) == pytest.approx(1 - beta_cdf(1 - x, b, a), abs=1e-10)

    @given(st.floats(0.001, 0.999), st.floats(0.2, 30), st.floats(0.2, 30))
    def test_quantile_is_its_inverse(self, share: float, a: float, b: float) -> None:
        x = beta_quantile(share, a, b)
        # Near an end the share may be steep enough to jump between two neighbouring floats.
        below, above = (beta_cdf(x * (1 + side), a, b) for side in (-1e-12, 1e-12))
        assert below - 1e-9 <= share <= above + 1e-9

    @given(st.floats(0, 1), st.floats(0, 1), st.floats(0.2, 30), st.floats(0.2, 30))
    def test_quantile_rises(self, one: float, two: float, a: float, b: float) -> None:
        low, high = sorted((one, two))
        assert beta_quantile(low, a, b) <= beta_quantile(high, a, b) + 1e-12


PINNED = [0.6932737827301025, 0.9028857350349426, 0.7062867283821106]
