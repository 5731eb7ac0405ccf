from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gracetune.optim.element_rates import RateGrid, RateLimits

NO = torch.tensor([False])


@st.composite
def limits(draw: st.DrawFn) -> RateLimits:
    low, high = sorted(draw(st.tuples(st.floats(1e-9, 1e-1), st.floats(1e-9, 1e-1))))
    bump = draw(st.floats(1e-10, 1e-2))
    assume(high / bump < 1e9)
    return RateLimits(bump, low, high)


def walk(grid: RateGrid, stored: torch.Tensor, ups: list[bool]) -> torch.Tensor:
    for up in ups:
        stored = (grid.moved(stored, torch.full(stored.shape, up), NO) - grid.bias).to(grid.dtype)
    return stored


class TestGrid:
    def test_of_the_defaults(self) -> None:
        grid = RateGrid.of(RateLimits())
        assert (grid.bump, grid.highest, grid.dtype) == (65, 65000, torch.int16)

    @given(limits())
    def test_takes_the_finest_unit_that_fits(self, config: RateLimits) -> None:
        grid = RateGrid.of(config)
        span = Fraction(config.max_lr) / Fraction(config.lr_bump)
        assert grid.unit * grid.bump == pytest.approx(config.lr_bump, rel=1e-15)
        room = 65535 if grid.dtype == torch.int16 else 1 << 30
        assert span * grid.bump <= room * (1 + Fraction(1, 10**11))
        assert span * (grid.bump + 1) > room * (1 - Fraction(1, 10**11)) or grid.bump == 1 << 30
        assert (grid.dtype == torch.int32) == (span > 65535)
        assert torch.iinfo(grid.dtype).min <= grid.lowest - grid.bias
        assert grid.highest - grid.bias <= torch.iinfo(grid.dtype).max

    @pytest.mark.parametrize(
        ("bump", "top", "dtype"), [(1e-6, 1e-3, torch.int16), (1e-8, 1e-3, torch.int32), (1e-9, 1e-1, torch.int32)]
    )
    def test_a_thousand_bumps_reach_the_top_exactly(self, bump: float, top: float, dtype: torch.dtype) -> None:
        """From `top` - 1000 bumps: rounding loses no bump anywhere in the range."""
        config = RateLimits(bump, bump, top)
        grid = RateGrid.of(config)
        assert grid.dtype == dtype
        stored = torch.tensor([grid.stored(max(bump, top - 1000 * bump))], dtype=grid.dtype)
        almost = walk(grid, stored, [True] * 998)
        assert int(almost) - int(stored) == 998 * grid.bump
        existing = walk(grid, almost, [True] * 2)
        assert grid.read(existing).item() == torch.tensor(top, dtype=torch.float32).item()

    def test_a_thousand_steps_of_the_defaults_go_from_start_to_end(self) -> None:
        grid = RateGrid.of(RateLimits())
        stored = torch.tensor([grid.stored(1e-6)], dtype=grid.dtype)
        for bumps in range(1, 1001):
            stored = walk(grid, stored, [True])
            assert float(grid.read(stored)) == pytest.approx(min(1e-6 * (bumps + 1), 1e-3), rel=1e-6)
        assert grid.read(stored).item() == torch.tensor(1e-3).item()
        down = walk(grid, stored, [False] * 1000)
        assert grid.read(down).item() == torch.tensor(1e-7).item()

    @given(limits(), st.floats(1e-9, 1e-1), st.lists(st.booleans(), max_size=60))
    def test_stays_within_a_unit_of_exact_rates(self, config: RateLimits, start: float, ups: list[bool]) -> None:
        grid = RateGrid.of(config)
        exact = min(max(start, config.min_lr), config.max_lr)
        stored = torch.tensor([grid.stored(start)], dtype=grid.dtype)
        for up in ups:
            exact = min(max(exact + (config.lr_bump if up else -config.lr_bump), config.min_lr), config.max_lr)
            stored = walk(grid, stored, [up])
            found = float(grid.read(stored))
            assert abs(found - exact) <= 1.001 * grid.unit + 1e-6 * exact
            assert config.min_lr * (1 - 1e-6) <= found <= config.max_lr * (1 + 1e-6)

    @given(limits(), st.floats(1e-9, 1e-1))
    def test_up_and_down_returns_to_the_start(self, config: RateLimits, start: float) -> None:
        grid = RateGrid.of(config)
        stored = torch.tensor([grid.stored(start)], dtype=grid.dtype)
        up = walk(grid, stored, [True])
        assume(int(up) + grid.bias < grid.highest)
        assert int(up) - int(stored) == grid.bump
        assert torch.equal(walk(grid, up, [False]), stored)

    def test_fresh_elements_do_not_move(self) -> None:
        grid = RateGrid.of(RateLimits())
        stored = torch.tensor([grid.stored(1e-5)] * 2, dtype=grid.dtype)
        moved = grid.moved(stored, torch.tensor([True, False]), torch.tensor([True, True]))
        assert torch.equal(moved - grid.bias, stored.int())

    @given(limits(), st.floats(1e-9, 1e-1))
    def test_tensors_and_numbers_are_stored_alike(self, config: RateLimits, rate: float) -> None:
        grid = RateGrid.of(config)
        assert abs(int(grid.store(torch.tensor([rate], dtype=torch.float64))) - grid.stored(rate)) <= 1


class TestLimits:
    @pytest.mark.parametrize("values", [(0, 1e-7, 1e-3), (1e-6, 1e-2, 1e-3), (1e-6, float("nan"), 1e-3), (1e-6, 0, 1)])
    def test_invalid_limits_are_rejected(self, values: tuple[float, float, float]) -> None:
        with pytest.raises(ValueError, match="all above 0, and min_lr at most max_lr"):
            RateLimits(*values)

    def test_a_bump_too_small_for_the_range_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="more than a billion times"):
            RateGrid.of(RateLimits(1e-15, 1e-7, 1e-3))
