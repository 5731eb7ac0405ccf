"""Pace, time left, number formats and curves."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.telemetry import number_format
from gracetune.telemetry.curves import decimate, evenly_spaced_indices, finite_points, moving_average, ticks
from gracetune.telemetry.events import Event, MemorySampled, MemoryStageChanged, RunStarted
from gracetune.telemetry.progress import ProgressTracker
from gracetune.units import format_bytes, format_duration
from unit.telemetry.sample_events import any_event, memory, start, step

numbers = st.floats(-1e12, 1e12)
curve = st.lists(st.tuples(st.integers(0, 10_000).map(float), numbers), max_size=300).map(sorted)


class TestProgress:
    def test_warm_up_does_not_count(self) -> None:
        progress = ProgressTracker()
        progress.observe(start())
        for number, pace in enumerate([90_000, 40_000, 9_000, 1000, 1100, 1050], 1):
            progress.observe(step(number, step_ms=float(pace)))
            if number <= 3:
                assert progress.status().seconds_per_step is None
                assert "measuring" in progress.status().line()
        status = progress.status()
        assert status.seconds_per_step == 1.05
        assert status.eta_s == pytest.approx(14 * 1.05)

    def test_an_event_of_several_steps_counts_once_its_first_step_is_warm(self) -> None:
        progress = ProgressTracker()
        progress.observe(start())
        progress.observe(step(10, steps=10, step_ms=9000.0))
        assert progress.status().seconds_per_step is None
        progress.observe(step(20, steps=10, step_ms=800.0))
        assert progress.status().seconds_per_step == 0.8

    def test_a_resumed_run_warms_up_again(self) -> None:
        progress = ProgressTracker()
        progress.observe(start(10))
        assert progress.status().step == 10
        progress.observe(step(11))
        assert progress.status().seconds_per_step is None
        progress.observe(step(14, step_ms=500.0))
        assert progress.status().seconds_per_step == 0.5

    @given(st.lists(st.floats(1, 1e6), min_size=1, max_size=80))
    def test_the_pace_is_the_median_of_the_recent(self, paces: list[float]) -> None:
        progress = ProgressTracker(warm_up_steps=0, recent=7)
        for number, pace in enumerate(paces, 1):
            progress.observe(step(number, step_ms=pace))
        assert progress.status().seconds_per_step == pytest.approx(median(paces[-7:]) / 1000)

    def test_the_line(self) -> None:
        progress = ProgressTracker(warm_up_steps=0)
        progress.observe(start())
        progress.observe(step(5, loss=0.12345, step_ms=1520.0))
        progress.observe(memory(5))
        assert progress.status().line() == (
            "step 5/20 · loss 0.1235 (high_noise) · 1.52 s/it · ETA 22.8 s · memory stage 1 · "
            "device 36.0 GiB · host 7.00 GiB"
        )

    def test_the_memory_stage_is_shown_from_the_step_that_changed_it(self) -> None:
        progress = ProgressTracker(warm_up_steps=0)
        progress.observe(start())
        progress.observe(step(5))
        assert progress.status().memory_stage is None
        progress.observe(MemoryStageChanged(step=7, before=1, after=2))
        assert progress.status().line().startswith("step 7/20 · loss")
        assert progress.status().line().endswith(" · memory stage 2")
        progress.observe(start(7))
        assert progress.status().line() == "step 7/20 · measuring"

    def test_the_line_of_a_run_without_steps(self) -> None:
        assert ProgressTracker().status().line() == "step 0 · measuring"
        progress = ProgressTracker()
        progress.observe(RunStarted(run="x"))
        progress.observe(MemorySampled(step=0, used_bytes={}))
        assert progress.status().line() == "step 0 · measuring"

    @given(st.lists(any_event, max_size=6))
    def test_any_events_give_a_line(self, events: list[Event]) -> None:
        progress = ProgressTracker(warm_up_steps=0)
        for event in events:
            progress.observe(event)
        assert progress.status().line().startswith("step ")


class TestNumberFormat:
    @given(st.integers(0, 1 << 60))
    def test_sizes_match_gracetune_units(self, count: int) -> None:
        assert number_format.size(count) == format_bytes(count)

    @given(st.floats(0, 48 * 3600 - 60) | st.floats(-10, -1e-6))
    def test_durations_match_gracetune_units(self, seconds: float) -> None:
        assert number_format.duration(seconds) == format_duration(seconds)

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (0.123456, "0.1235"), (1234567, "1,234,567"), (1.2e-5, "1.2e-05"), (-0.5, "-0.5"),
         (12345.678, "12,346"), (math.nan, "nan"), (math.inf, "inf"), (3.0, "3")],
    )  # fmt: skip
    def test_numbers(self, value: float, text: str) -> None:
        assert number_format.number(value) == text

    def test_days(self) -> None:
        assert number_format.duration(49 * 3600) == "2d 01h"
        assert number_format.duration(None) == number_format.duration(math.nan) == "unknown"


class TestCurves:
    @given(curve)
    def test_a_smoothed_curve_stays_between_the_extremes(self, points: list[tuple[float, float]]) -> None:
        made = moving_average(points)
        assert [x for x, _ in made] == [x for x, _ in points]
        ys = [y for _, y in points]
        slack = 1e-9 * max((abs(y) for y in ys), default=0)
        assert all(min(ys) - slack <= y <= max(ys) + slack for _, y in made)

    def test_smoothing_has_no_bias_at_its_start(self) -> None:
        assert [y for _, y in moving_average([(float(n), 5.0) for n in range(100)])] == pytest.approx([5.0] * 100)

    def test_non_finite_values_are_skipped(self) -> None:
        points = [(1.0, 2.0), (2.0, math.nan), (3.0, math.inf), (4.0, 4.0)]
        assert finite_points(points) == ((1.0, 2.0), (4.0, 4.0))
        assert moving_average(points, 1)[-1] == (4.0, 4.0)

    @given(curve, st.integers(6, 50))
    def test_thinning_keeps_order_ends_and_extremes(self, points: list[tuple[float, float]], most: int) -> None:
        made = decimate(points, most)
        assert len(made) <= max(most, 0)
        assert [*made] == sorted(made, key=lambda point: point[0])
        assert set(made) <= set(points)
        if points:
            assert (made[0], made[-1]) == (points[0], points[-1])
            for choose in (min, max):
                assert choose(y for _, y in made) == choose(y for _, y in points)

    @given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
    def test_ticks_are_few_and_inside(self, low: float, span: float) -> None:
        high = low + span
        made = ticks(low, high)
        slack = max(abs(low), abs(high)) * 1e-9 + span * 1e-6
        assert 1 <= len(made) <= 12 or span < abs(low) * 1e-12
        assert all(low - slack <= tick <= high + slack for tick in made)

    @given(st.integers(0, 500), st.integers(1, 40))
    def test_evenly(self, count: int, most: int) -> None:
        made = evenly_spaced_indices(count, most)
        assert len(made) == min(count, most)
        assert [*made] == sorted(set(made))
        if count:
            assert made[-1] == count - 1
            assert made[0] == 0 or most == 1
