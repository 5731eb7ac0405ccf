from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.run_config import BatchRamp, Training
from gracetune.errors import ConfigError
from gracetune.optim.batch_ramp import Ramp, StepBatch, ramp_of


@st.composite
def ramps(draw: st.DrawFn) -> Ramp:
    world = draw(st.integers(1, 8))
    initial = draw(st.integers(world, 500))
    target = draw(st.integers(initial, 1000))
    return Ramp(initial, target, draw(st.integers(0, 400)), draw(st.integers(1, 64)), world)


@given(ramps(), st.integers(0, 500), st.integers(0, 100))
def test_samples_are_the_sum_over_steps(ramp: Ramp, consumed: int, count: int) -> None:
    sizes = [
        step_batch.micro_batch * step_batch.accumulation for step_batch in islice(ramp.step_batches(consumed), count)
    ]
    assert ramp.samples(consumed, count) == sum(sizes)


def test_samples_of_a_very_long_run_need_no_iteration() -> None:
    assert Ramp(1, 8, 100, 4).samples(200, 10**9) == 8 * 10**9


@given(ramps(), st.integers(0, 1000))
def test_a_step_is_as_near_to_the_wanted_batch_as_whole_micro_batches_allow(ramp: Ramp, consumed: int) -> None:
    step_batch = ramp.step_batch(consumed)
    size = step_batch.micro_batch * step_batch.accumulation * ramp.world_size
    grain = ramp.world_size if step_batch.micro_batch < ramp.micro_batch else ramp.micro_batch * ramp.world_size
    assert step_batch.accumulation >= 1
    assert 1 <= step_batch.micro_batch <= ramp.micro_batch
    assert abs(size - ramp.effective(consumed)) <= grain / 2


@given(ramps())
def test_steps_only_grow_and_end_at_the_target(ramp: Ramp) -> None:
    step_batches = list(islice(ramp.step_batches(), ramp.ramp_steps + 2))
    sizes = [step_batch.micro_batch * step_batch.accumulation for step_batch in step_batches]
    assert sizes == sorted(sizes)
    assert step_batches[-1] == ramp.step_batch(ramp.ramp_steps)


@given(ramps(), st.integers(0, 20))
def test_a_resumed_ramp_continues(ramp: Ramp, done: int) -> None:
    step_batches = list(islice(ramp.step_batches(), done + 10))
    consumed = sum(step_batch.accumulation for step_batch in step_batches[:done])
    assert list(islice(ramp.step_batches(consumed), 10)) == step_batches[done:]


def test_the_documented_recipe_ramps_the_micro_batch_itself() -> None:
    """`train_batch_size` 32 with an initial effective batch of 4, which has no effect in the fork."""
    ramp = Ramp(initial=4, target=64, ramp_steps=10, micro_batch=32)
    assert [ramp.step_batch(n) for n in (0, 5, 7, 8, 10)] == [
        StepBatch(4, 1), StepBatch(19, 1), StepBatch(32, 1), StepBatch(32, 1), StepBatch(32, 2),
    ]  # fmt: skip


def test_without_a_ramp_every_step_has_the_configured_batch() -> None:
    ramp = ramp_of(Training(batch_size=3, gradient_accumulation_steps=5), world_size=2)
    assert set(islice(ramp.step_batches(), 20)) == {StepBatch(3, 5)}
    assert ramp.first_line is None


def test_the_log_line_counts_micro_batches() -> None:
    config = BatchRamp(
        enabled=True, initial_effective_batch_size=4, target_effective_batch_size=32, batch_rampup_steps=100
    )
    ramp = ramp_of(Training(batch_size=2, ramp=config), world_size=1)
    assert ramp.first_line == "GH200 gradient accumulation ramp enabled (initial=2, target=16, ramp_steps=100)"


def test_fewer_samples_than_processes_is_rejected() -> None:
    config = BatchRamp(
        enabled=True, initial_effective_batch_size=2, target_effective_batch_size=32, batch_rampup_steps=100
    )
    with pytest.raises(ConfigError, match="at least 4"):
        ramp_of(Training(ramp=config), world_size=4)
