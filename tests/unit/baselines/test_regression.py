"""Which differences are a regression: by statistics on many seeds, and case by case."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.baselines.baseline import Baseline
from gracetune.baselines.regression import (
    CONFIDENCE,
    Comparison,
    ComparisonRow,
    bounding_rank,
    bounds_of,
    compare,
    parse_tolerance,
)
from gracetune.baselines.rendering import sentence, table
from gracetune.telemetry.errors import TelemetryError
from unit.baselines.sample_baselines import Noise, baseline

SEEDS = 200
PAIRS = st.floats(1.0, 1e4)
OTHER_MACHINE: dict[str, Any] = {"hardware": {"cpu": "another CPU", "cores": 2, "threads": 1, "profile": "cpu"}}
SLOW_PROBE = {"what": "a product on cpu", "gemm_ms": (20.0,), "copy_ms": (9.0,)}
OTHER_CONFIG: dict[str, Any] = {
    "config_fingerprint": "def",
    "config": {"model.family": "flux", "training.batch_size": 4},
}


def row(comparison: Comparison, name: str) -> ComparisonRow:
    return next(one for one in comparison.rows if one.name == name)


def flagged(noise: Noise, steps: int, slower: float) -> int:
    found = 0
    for seed in range(SEEDS):
        before = baseline(noise.times(2 * seed, steps, 100.0))
        after = baseline(noise.times(2 * seed + 1, steps, 100.0 * slower))
        found += bool(compare(before, after, 0.05).regressions)
    return found


class TestNoise:
    """2 % from step to step, a drift, stalls, and a pace of its own for each run."""

    @pytest.mark.parametrize("steps", [20, 50])
    @pytest.mark.parametrize("noise", [Noise(), Noise(run=0.02)], ids=["usual", "runs-differ-by-2-percent"])
    def test_is_no_regression_over_repeated_runs(self, noise: Noise, steps: int) -> None:
        assert flagged(noise, steps, 1.0) <= SEEDS // 100

    def test_nor_is_being_two_percent_slower(self) -> None:
        assert flagged(Noise(), 50, 1.02) <= SEEDS // 100

    @pytest.mark.parametrize(("steps", "at_least"), [(20, 0.95), (50, 0.99)])
    def test_does_not_hide_a_slowdown_of_ten_percent(self, steps: int, at_least: float) -> None:
        assert flagged(Noise(), steps, 1.10) >= at_least * SEEDS

    def test_that_is_too_large_to_tell_is_said(self) -> None:
        noise = Noise(step=0.3)
        found = compare(baseline(noise.times(1, 20, 100.0)), baseline(noise.times(2, 20, 115.0)), 0.05)
        assert row(found, "step time").verdict == "unclear"
        assert "capture more (--steps)" in row(found, "step time").reason
        assert sentence(found).startswith("no regression proven; unclear: step time")

    def test_that_could_hide_a_regression_is_said_too(self) -> None:
        found = compare(baseline((100.0,) * 20), baseline((80.0, 125.0) * 10), 0.05)
        step = row(found, "step time")
        assert (step.verdict, step.reason) == ("within", "between -20.0% and +25.0%")
        assert row(found, "throughput").reason == ""
        assert sentence(found) == "no regression proven beyond 5.0%; noise could hide one in step time"
        assert sentence(compare(baseline(), baseline(), 0.05)) == "no regression beyond 5.0%"


class TestBounds:
    @pytest.mark.parametrize("count", [6, 7, 12, 25, 200])
    def test_are_as_sure_as_they_say_and_no_wider(self, count: int) -> None:
        rank = bounding_rank(count)
        assert rank is not None
        chances = [sum(math.comb(count, k) for k in range(rank + 1 + more)) / 2**count for more in (0, 1)]
        assert chances[0] <= 1 - CONFIDENCE < chances[1]

    def test_of_few_values_are_unknown(self) -> None:
        assert bounding_rank(5) is None
        assert bounds_of([1.0, 2.0, 3.0]).low is None

    @given(st.lists(PAIRS, min_size=6, max_size=60))
    def test_lie_around_the_median(self, values: list[float]) -> None:
        found = bounds_of(values)
        assert found.low is not None
        assert found.high is not None
        assert min(values) <= found.low <= found.middle <= found.high <= max(values)

    @settings(max_examples=40)
    @given(st.lists(PAIRS, min_size=6, max_size=40), st.floats(1.06, 10))
    def test_the_same_times_a_factor_is_always_a_regression_and_never_one_the_other_way(
        self, times: list[float], factor: float
    ) -> None:
        fast, slow = baseline(tuple(times)), baseline(tuple(factor * one for one in times))
        assert {one.name for one in compare(fast, slow, 0.05).regressions} == {"step time", "throughput"}
        assert not compare(slow, fast, 0.05).regressions
        assert not compare(fast, fast, 0.0).regressions


class TestSteps:
    def test_are_compared_in_pairs_so_a_ramp_is_no_noise(self) -> None:
        ramp = tuple(100.0 * (1 + step) for step in range(30))
        found = compare(baseline(ramp), baseline(tuple(1.08 * one for one in ramp)), 0.05)
        assert row(found, "step time").low == pytest.approx(1.08)
        assert row(found, "step time").verdict == "regression"

    def test_only_those_both_have_count(self) -> None:
        long = (100.0,) * 20 + (300.0,) * 40
        assert not compare(baseline(long), baseline(long[:20]), 0.05).regressions

    def test_too_few_in_common_prove_nothing(self) -> None:
        found = compare(baseline((100.0,) * 4), baseline((200.0,) * 4), 0.05)
        assert not found.regressions
        assert row(found, "step time").verdict == "unclear"

    def test_none_in_common_is_an_error(self) -> None:
        late: dict[str, Any] = {"warm_up": 90, "ms": (1.0,), "samples": (1,), "data_wait_ms": (0.0,)}
        with pytest.raises(TelemetryError, match="without a step in common"):
            compare(baseline(), baseline(steps=late), 0.05)

    def test_stalls_that_the_median_does_not_see_are_seen_by_the_throughput(self) -> None:
        stalled = tuple(300.0 if step % 4 == 0 else 100.0 for step in range(40))
        found = compare(baseline((100.0,) * 40), baseline(stalled), 0.05)
        assert row(found, "step time").verdict == "within"
        assert row(found, "throughput").verdict == "regression"
        assert row(found, "throughput").ratio == pytest.approx(2 / 3)

    def test_faster_is_better(self) -> None:
        found = compare(baseline((100.0,) * 30), baseline((50.0,) * 30), 0.05)
        assert [row(found, name).verdict for name in ("step time", "throughput")] == ["better", "better"]
        assert row(found, "throughput").reason == "+100.0% at least"


def with_memory(**peaks: int) -> Baseline:
    return baseline(memory={"peak_bytes": peaks, "owners_bytes": {}})


class TestMemory:
    @pytest.mark.parametrize(
        ("before", "after", "verdict"),
        [
            ({"device": 1000}, {"device": 1051}, "regression"),
            ({"device": 1000}, {"device": 1050}, "within"),
            ({"device": 1000}, {"device": 900}, "better"),
            ({"device": 0}, {"device": 10}, "regression"),
            ({"host": 100 << 20}, {"host": 120 << 20}, "within"),
            ({"host": 100 << 20}, {"host": 140 << 20}, "regression"),
            ({"host": 10 << 30}, {"host": 11 << 30}, "regression"),
        ],
    )
    def test_beyond_the_tolerance_and_what_a_process_differs_by(
        self, before: dict[str, int], after: dict[str, int], verdict: str
    ) -> None:
        (found,) = [
            one for one in compare(with_memory(**before), with_memory(**after), 0.05).rows if "memory" in one.name
        ]
        assert found.verdict == verdict


class TestMachines:
    def test_that_differ_are_compared_by_their_probes(self) -> None:
        found = compare(baseline((100.0,) * 30), baseline((200.0,) * 30, **OTHER_MACHINE, probe=SLOW_PROBE), 0.05)
        assert found.relative
        assert not found.regressions
        assert (row(found, "step time").before, row(found, "step time").after) == (10.0, 10.0)
        assert row(found, "throughput").before == pytest.approx(row(found, "throughput").after)
        assert "the machines differ (cpu: a CPU -> another CPU)" in found.notes[0]
        assert found.as_json()["compared_as"] == "ratios to each machine's probe"

    def test_a_regression_shows_there_too(self) -> None:
        found = compare(baseline((100.0,) * 30), baseline((220.0,) * 30, **OTHER_MACHINE, probe=SLOW_PROBE), 0.05)
        assert {one.name for one in found.regressions} == {"step time", "throughput"}

    def test_a_probe_that_is_noisy_itself_proves_nothing(self) -> None:
        noisy = SLOW_PROBE | {"gemm_ms": (15.0, 25.0)}
        found = compare(baseline((100.0,) * 30), baseline((220.0,) * 30, **OTHER_MACHINE, probe=noisy), 0.05)
        step = row(found, "step time")
        assert (step.verdict, step.ratio) == ("unclear", pytest.approx(1.1))
        assert (step.low, step.high) == (pytest.approx(0.88), pytest.approx(22 / 15))
        assert row(found, "throughput").verdict == "unclear"

    def test_their_process_memory_is_not_judged_but_their_gpus_is(self) -> None:
        small = {"peak_bytes": {"host": 1 << 30, "device": 1 << 30}, "owners_bytes": {}}
        large = {"peak_bytes": {"host": 2 << 30, "device": 2 << 30}, "owners_bytes": {}}
        found = compare(baseline(memory=small), baseline(memory=large, **OTHER_MACHINE), 0.05)
        assert row(found, "peak memory, host").verdict == "not judged"
        assert row(found, "peak memory, device").verdict == "regression"

    def test_a_gpu_and_a_cpu_have_nothing_in_common(self) -> None:
        with pytest.raises(TelemetryError, match="no measure in common"):
            compare(baseline(), baseline(device="cuda"), 0.05)

    def test_other_versions_on_the_same_machine_are_said_and_judged_as_measured(self) -> None:
        found = compare(baseline(), baseline((120.0,) * 30, versions={"torch": "2.14.0"}), 0.05)
        assert not found.relative
        assert found.regressions
        assert found.notes == ("versions differ: torch: '2.13.0' -> '2.14.0'",)

    def test_a_machine_that_was_slower_itself_is_said(self) -> None:
        slow = {"what": "a product on cpu", "gemm_ms": (12.0,), "copy_ms": (5.0,)}
        assert "its probe took +20.0%" in compare(baseline(), baseline(probe=slow), 0.05).notes[0]


class TestConfigurations:
    def test_that_differ_are_rejected_with_what_differs(self) -> None:
        with pytest.raises(TelemetryError) as error:
            compare(baseline(), baseline(**OTHER_CONFIG), 0.05)
        assert error.value.found == "training.batch_size: 1 -> 4"
        assert "--allow-other-config" in error.value.hint

    def test_unless_that_is_allowed(self) -> None:
        found = compare(baseline(), baseline(**OTHER_CONFIG), 0.05, allow_other_config=True)
        assert found.notes == ("the configurations differ: training.batch_size: 1 -> 4",)


class TestTolerance:
    @pytest.mark.parametrize(("text", "value"), [("5%", 0.05), (" 2.5 %", 0.025), ("0.05", 0.05), ("0", 0.0)])
    def test_is_a_share(self, text: str, value: float) -> None:
        assert parse_tolerance(text) == pytest.approx(value)

    @pytest.mark.parametrize("text", ["abc", "", "%", "5", "-1%", "nan", "inf", "100%", "5 percent"])
    def test_anything_else_is_rejected(self, text: str) -> None:
        with pytest.raises(TelemetryError, match="--tolerance 5%"):
            parse_tolerance(text)


def test_the_table_is_readable() -> None:
    text = table(compare(baseline(), baseline((120.0,) * 30), 0.05))
    lines = text.splitlines()
    assert lines[0].split() == ["before", "after", "change", "verdict"]
    assert lines[1].split()[:6] == ["step", "time", "100", "ms", "120", "ms"]
    assert lines[1].endswith("+20.0%  regression: +20.0% at least")
    assert lines[2].endswith("regression: -16.7% at best")
    assert "1.00 GiB" in lines[3]
