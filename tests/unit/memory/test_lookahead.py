from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.memory.lookahead import Arrival, Depth, InPlace, LookAhead, LookAheadStats, next_depth


@dataclass
class Clocked:
    """An arrival whose times are given, as a GPU's events would give them."""

    waited: float
    step: float
    past: bool = True

    def is_past(self) -> bool:
        return self.past

    def waited_ms(self) -> float:
        return self.waited

    def until_ms(self, following: Arrival) -> float:
        return self.step


@dataclass
class Logged:
    """A mover that writes down what happens to each batch, in order."""

    log: list[str] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    arrivals: dict[str, Clocked] = field(default_factory=dict)
    kept: int = 99

    def keep(self, slots: int) -> None:
        self.kept = slots

    def start(self, batch: Mapping[str, torch.Tensor]) -> LoggedMove:
        (name,) = batch
        self.log.append(f"start {name}")
        return LoggedMove(self, name, batch)


@dataclass
class LoggedMove:
    owner: Logged
    name: str
    batch: Mapping[str, torch.Tensor]
    bytes: int = 10

    def arrive(self) -> tuple[Mapping[str, torch.Tensor], Clocked]:
        self.owner.log.append(f"arrive {self.name}")
        arrival = Clocked(self.owner.waits.get(self.name, 0.0), 100.0, past=self.name not in self.owner.late)
        self.owner.arrivals[self.name] = arrival
        return self.batch, arrival

    def release(self) -> None:
        self.owner.log.append(f"release {self.name}")


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{f"b{index}": torch.zeros(1)} for index in range(count)]


def test_the_next_batch_moves_while_this_one_is_used() -> None:
    mover = Logged()
    ahead = LookAhead(batches(3), mover, depth=1)
    assert list(next(ahead)) == ["b0"]
    assert mover.log == ["start b0", "arrive b0", "start b1"]
    assert list(next(ahead)) == ["b1"]
    assert mover.log[3:] == ["release b0", "arrive b1", "start b2"]
    assert [list(batch) for batch in ahead] == [["b2"]]
    assert mover.log[-1] == "release b2"
    assert (ahead.stats.batches, ahead.stats.prefetched_bytes) == (3, 30)


def test_without_look_ahead_a_batch_moves_when_it_is_asked_for() -> None:
    mover = Logged()
    list(LookAhead(batches(2), mover, depth=0))
    assert mover.log == ["start b0", "arrive b0", "release b0", "start b1", "arrive b1", "release b1"]


def test_depth_grows_after_a_wait_and_shrinks_when_memory_is_tight() -> None:
    mover, tight = Logged(waits={"b0": 50.0, "b1": 30.0}), []
    ahead = LookAhead(batches(12), mover, depth=1, most=3, memory_tight=lambda: bool(tight))
    depths = []
    for _ in range(6):
        next(ahead)
        depths.append(ahead.depth.value)
    assert depths == [1, 1, 2, 3, 3, 3]
    tight.append(1)
    next(ahead)
    assert ahead.depth == Depth(2, "memory is tight")
    assert ahead.stats.wait_ms == 80.0


def test_a_step_still_running_is_judged_later_never_waited_for() -> None:
    mover = Logged(waits={"b0": 50.0}, late={"b1"})
    ahead = LookAhead(batches(5), mover, depth=1)
    for _ in range(3):
        next(ahead)
    assert (ahead.stats.wait_ms, ahead.depth.value) == (0.0, 1)
    mover.arrivals["b1"].past = True
    next(ahead)
    assert (ahead.stats.wait_ms, ahead.depth.value) == (50.0, 2)


def test_in_place_hands_over_the_very_tensors() -> None:
    given_batches = batches(3)
    for given_batch, handed in zip(given_batches, LookAhead(given_batches, InPlace()), strict=True):
        assert handed is given_batch


@pytest.mark.parametrize("depth", [-1, 5])
def test_depths_out_of_range(depth: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 4"):
        LookAhead([], InPlace(), depth=depth)


@given(st.integers(1, 4), st.floats(0, 100), st.floats(0.1, 100), st.booleans())
def test_depth_moves_by_one_and_stays_in_bounds(depth: int, waited: float, step: float, tight: bool) -> None:
    chosen = next_depth(depth, waited_ms=waited, step_ms=step, memory_tight=tight)
    assert 1 <= chosen.value <= 4
    assert abs(chosen.value - depth) <= 1
    assert chosen.reason
    assert not (tight and chosen.value > depth)


@given(
    st.integers(0, 6), st.integers(0, 4), st.dictionaries(st.sampled_from(["b0", "b1", "b2", "b3"]), st.floats(0, 90))
)
def test_every_batch_comes_once_in_order_and_is_released(count: int, depth: int, waits: dict[str, float]) -> None:
    mover = Logged(waits=waits)
    seen = [next(iter(batch)) for batch in LookAhead(batches(count), mover, depth=depth)]
    assert seen == [f"b{index}" for index in range(count)]
    assert sum(line.startswith("release") for line in mover.log) == count


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_failing_source_is_heard_after_the_batches_before_it(depth: int) -> None:
    def source() -> Iterator[Mapping[str, torch.Tensor]]:
        yield from batches(2)
        raise OSError("disk gone")

    ahead = LookAhead(source(), Logged(), depth=depth)
    assert [next(iter(next(ahead))), next(iter(next(ahead)))] == ["b0", "b1"]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(ahead)


def test_room_is_given_up_when_the_look_ahead_grows_shallower() -> None:
    mover, tight = Logged(), [1]
    ahead = LookAhead(batches(8), mover, depth=4, memory_tight=lambda: bool(tight))
    for _ in range(6):
        next(ahead)
    assert ahead.depth.value == 1
    assert mover.kept == 2


def test_statistics_go_on_from_one_epoch_to_the_next() -> None:
    stats = LookAheadStats()
    for _ in range(2):
        list(LookAhead(batches(3), Logged(), depth=1, stats=stats))
    assert (stats.batches, stats.prefetched_bytes) == (6, 60)
