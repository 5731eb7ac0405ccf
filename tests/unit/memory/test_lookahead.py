from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.memory.lookahead import Arrival, Depth, InPlace, LookAhead, LookAheadStats, next_depth
from gracetune.memory.stacked import Constant, Stacked


@dataclass
class Clocked:
    """An arrival with given times, as a GPU's events would report them."""

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
    """A mover that logs the events of each batch, in order."""

    log: list[str] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    arrivals: dict[str, Clocked] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    """Batches whose step has ended before the next one is requested."""
    kept: int = 99

    def keep(self, slots: int) -> None:
        self.kept = slots

    def close(self) -> None:
        self.log.append("close")

    def start(self, batch: Mapping[str, torch.Tensor], *, ahead: bool = True) -> LoggedMove:
        (name,) = batch
        self.log.append(f"start {name}" if ahead else f"start {name} now")
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

    def release(self) -> bool:
        self.owner.log.append(f"release {self.name}")
        return self.name in self.owner.awaited


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
    assert mover.log == ["start b0 now", "arrive b0", "release b0", "start b1 now", "arrive b1", "release b1"]


def test_a_gpu_that_waits_gets_its_batch_before_others_are_gathered() -> None:
    mover = Logged(awaited={"b0", "b2", "b3", "b4"})
    ahead = LookAhead(batches(9), mover, depth=2)
    next(ahead)
    assert mover.log == ["start b0", "start b1", "arrive b0", "start b2"]
    for name, expected in (
        ("b1", ["release b0", "arrive b1"]),
        ("b2", ["release b1", "start b3", "arrive b2", "start b4"]),
        ("b3", ["release b2", "arrive b3"]),
        ("b4", ["release b3", "arrive b4", "start b5", "start b6"]),
        ("b5", ["release b4", "arrive b5"]),
    ):
        mover.log.clear()
        assert list(next(ahead)) == [name]
        assert mover.log == expected


def test_depth_grows_after_a_wait_and_shrinks_when_memory_is_tight() -> None:
    mover, tight = Logged(waits={"b0": 50.0, "b1": 30.0}), []
    changes: list[tuple[int, int, str]] = []
    ahead = LookAhead(
        batches(12), mover, depth=1, most=3, memory_tight=lambda: bool(tight),
        on_change=lambda before, after: changes.append((before.value, after.value, after.reason)),
    )  # fmt: skip
    depths = []
    for _ in range(6):
        next(ahead)
        depths.append(ahead.depth.value)
    assert depths == [1, 1, 2, 3, 3, 3]
    tight.append(1)
    next(ahead)
    assert ahead.depth == Depth(2, "memory is tight")
    assert ahead.stats.wait_ms == 80.0
    assert changes == [
        (1, 2, "the step waited 50.00 ms for its data and computed for 100.00 ms"),
        (2, 3, "the step waited 30.00 ms for its data and computed for 100.00 ms"),
        (3, 2, "memory is tight"),
    ]


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


def test_what_is_discarded_is_released_and_others_come_instead() -> None:
    mover = Logged()
    given_batches = iter(batches(6))
    ahead = LookAhead(given_batches, mover, depth=2)
    next(ahead)
    ahead.discard()
    assert mover.log[-2:] == ["release b1", "release b2"]
    assert list(next(ahead)) == ["b3"]
    assert mover.log.count("release b0") == 1, "the batch in use is released when the next is requested"


def test_closing_forgets_the_batches_under_way_and_closes_the_mover() -> None:
    mover = Logged()
    ahead = LookAhead(iter(batches(6)), mover, depth=2)
    next(ahead)
    ahead.close()
    assert mover.log[-3:] == ["release b1", "release b2", "close"]


def test_a_discarded_failure_is_forgotten() -> None:
    class Source:
        def __init__(self) -> None:
            self.calls = 0

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> dict[str, torch.Tensor]:
            self.calls += 1
            if self.calls == 2:
                raise OSError("not yet")
            return {f"b{self.calls}": torch.zeros(1)}

    ahead = LookAhead(Source(), Logged(), depth=1)
    assert list(next(ahead)) == ["b1"]
    assert ahead.is_stuck
    with pytest.raises(OSError, match="not yet"):
        next(ahead)
    assert ahead.is_stuck
    ahead.discard()
    assert not ahead.is_stuck
    assert list(next(ahead)) == ["b3"]


@given(
    st.lists(st.one_of(st.integers(0, 4), st.none()), min_size=1, max_size=5),
    st.integers(4, 6),
    st.sampled_from([0.0, 1.0, 7.0]),
)
def test_pieces_are_put_together(lengths: list[int | None], longest: int, fill: float) -> None:
    """None stands for a piece without a tensor."""
    chunks = [
        Constant((2, 3), 5.0) if length is None else torch.arange(1.0, 1 + length * 3).view(length, 3)
        for length in lengths
    ]
    part = Stacked((len(chunks), longest, 3), torch.float32, tuple(chunks), fill)
    (batch,) = LookAhead([{"x": part, "y": torch.ones(1)}], InPlace())
    assert part.nbytes == batch["x"].nbytes
    for row, chunk in zip(batch["x"], chunks, strict=True):
        expected = torch.full((2, 3), 5.0) if isinstance(chunk, Constant) else chunk
        assert torch.equal(row[: len(expected)], expected)
        assert bool((row[len(expected) :] == fill).all())


def test_whole_pieces_are_copied_not_shared() -> None:
    chunks = (torch.ones(2, 2), torch.zeros(2, 2))
    (batch,) = LookAhead([{"x": Stacked((2, 2, 2), torch.float32, chunks)}], InPlace())
    batch["x"].fill_(9.0)
    assert chunks[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
