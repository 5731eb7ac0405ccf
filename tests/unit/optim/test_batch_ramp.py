from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.run_config import BatchRamp, Training
from gracetune.errors import ConfigError
from gracetune.optim.batch_ramp import Ramp, Window, ramp_of


@st.composite
def ramps(draw: st.DrawFn) -> Ramp:
    world = draw(st.integers(1, 8))
    initial = draw(st.integers(world, 500))
    target = draw(st.integers(initial, 1000))
    return Ramp(initial, target, draw(st.integers(0, 400)), draw(st.integers(1, 64)), world)


@given(ramps(), st.integers(0, 500), st.integers(0, 100))
def test_samples_are_those_of_the_windows(ramp: Ramp, consumed: int, count: int) -> None:
    sizes = [window.micro_batch * window.accumulation for window in islice(ramp.windows(consumed), count)]
    assert ramp.samples(consumed, count) == sum(sizes)


def test_a_run_without_an_end_is_counted_at_once() -> None:
    assert Ramp(1, 8, 100, 4).samples(200, 10**9) == 8 * 10**9


@given(ramps(), st.integers(0, 1000))
def test_a_window_is_as_near_to_the_wanted_batch_as_whole_micro_batches_allow(ramp: Ramp, consumed: int) -> None:
    window = ramp.window(consumed)
    size = window.micro_batch * window.accumulation * ramp.world_size
    grain = ramp.world_size if window.micro_batch < ramp.micro_batch else ramp.micro_batch * ramp.world_size
    assert window.accumulation >= 1
    assert 1 <= window.micro_batch <= ramp.micro_batch
    assert abs(size - ramp.effective(consumed)) <= grain / 2


@given(ramps())
def test_windows_only_grow_and_end_at_the_target(ramp: Ramp) -> None:
    windows = list(islice(ramp.windows(), ramp.ramp_steps + 2))
    sizes = [window.micro_batch * window.accumulation for window in windows]
    assert sizes == sorted(sizes)
    assert windows[-1] == ramp.window(ramp.ramp_steps)


@given(ramps(), st.integers(0, 20))
def test_a_resumed_ramp_goes_on_where_it_was(ramp: Ramp, done: int) -> None:
    windows = list(islice(ramp.windows(), done + 10))
    consumed = sum(window.accumulation for window in windows[:done])
    assert list(islice(ramp.windows(consumed), 10)) == windows[done:]


def test_the_documented_recipe_ramps_the_micro_batch_itself() -> None:
    """`train_batch_size` 32 with an initial effective batch of 4: a no-op in the fork."""
    ramp = Ramp(initial=4, target=64, ramp_steps=10, micro_batch=32)
    assert [ramp.window(n) for n in (0, 5, 7, 8, 10)] == [
        Window(4, 1), Window(19, 1), Window(32, 1), Window(32, 1), Window(32, 2),
    ]  # fmt: skip


def test_without_a_ramp_every_window_is_the_config_s() -> None:
    ramp = ramp_of(Training(batch_size=3, gradient_accumulation_steps=5), world_size=2)
    assert set(islice(ramp.windows(), 20)) == {Window(3, 5)}
    assert ramp.first_line is None


def test_the_log_line_speaks_in_micro_batches() -> None:
    asked = BatchRamp(
        enabled=True, initial_effective_batch_size=4, target_effective_batch_size=32, batch_rampup_steps=100
    )
    ramp = ramp_of(Training(batch_size=2, ramp=asked), world_size=1)
    assert ramp.first_line == "GH200 gradient accumulation ramp enabled (initial=2, target=16, ramp_steps=100)"


def test_fewer_samples_than_processes_is_refused() -> None:
    asked = BatchRamp(
        enabled=True, initial_effective_batch_size=2, target_effective_batch_size=32, batch_rampup_steps=100
    )
    with pytest.raises(ConfigError, match="at least 4"):
        ramp_of(Training(ramp=asked), world_size=4)
