from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.memory_options import MemoryOptions
from gracetune.errors import ConfigError
from gracetune.memory.errors import MemoryPressure
from gracetune.memory.governor import (
    Action,
    ArenaChange,
    Counters,
    Decision,
    Governor,
    GovernorState,
    MemoryChange,
    MemoryStageChange,
    PressureLimits,
    Reclamation,
    decide,
    demotion_budget,
)
from gracetune.memory.sensors import DeviceReading, MemoryReading
from gracetune.units import GIB

TOTAL = 100 * GIB
LIMITS = PressureLimits(threshold=0.10, min_bytes=0, host_reserve=8 * GIB)
FLOOR, CALM = 10 * GIB, 15 * GIB


def seen(available: int | None = 50 * GIB, *, arena: int | None = 0, host: int | None = 200 * GIB) -> MemoryReading:
    device = None if available is None else DeviceReading(available, TOTAL)
    return MemoryReading(arena_active=arena, device=device, host_headroom=host)


def stage_2(*, calm: int = 0, arena_high: int = 0) -> GovernorState:
    return GovernorState(stage=2, calm=calm, arena_high=arena_high)


def follow(state: GovernorState, readings: list[MemoryReading]) -> list[Decision]:
    decisions = []
    for reading in readings:
        decisions.append(decide(state, reading, LIMITS))
        state = decisions[-1].state
    return decisions


def changes(start: GovernorState, decisions: list[Decision]) -> int:
    memory_stages = [start.stage, *(decision.state.stage for decision in decisions)]
    return sum(before != after for before, after in pairwise(memory_stages))


AVAILABLE = st.integers(0, TOTAL)
ARENA = st.one_of(st.just(0), st.integers(1, 400 * GIB))
HOST = st.integers(0, 400 * GIB)
ANY = st.builds(
    lambda available, arena, host: seen(available, arena=arena, host=host),
    st.none() | AVAILABLE,
    st.none() | ARENA,
    st.none() | HOST,
)
PRESSURE = st.one_of(
    st.builds(lambda available: seen(available), st.integers(0, FLOOR - 1)),
    st.builds(lambda available, arena: seen(available, arena=arena), st.none() | AVAILABLE, st.integers(1, TOTAL)),
)
CALM_READING = st.builds(lambda available: seen(available), st.integers(CALM + 1, TOTAL))
IN_BAND = st.builds(lambda available: seen(available), st.integers(FLOOR, CALM))
START = st.sampled_from([GovernorState(), stage_2(), stage_2(calm=1), stage_2(calm=2), stage_2(arena_high=GIB)])


class TestEnteringStage2:
    @given(prefix=st.lists(ANY), pressure=PRESSURE)
    def test_happens_on_the_very_sample_that_shows_pressure(
        self, prefix: list[MemoryReading], pressure: MemoryReading
    ) -> None:
        decisions = follow(GovernorState(), [*prefix, pressure])
        assert decisions[-1].state.stage == 2

    @given(PRESSURE)
    def test_brings_one_light_reclamation(self, pressure: MemoryReading) -> None:
        decision = decide(GovernorState(), pressure, LIMITS)
        assert decision.actions == (Action.LIGHT_RECLAMATION,)
        assert decision.reason.startswith("stage 1 -> 2: ")

    def test_the_floor_itself_is_no_pressure(self) -> None:
        assert decide(GovernorState(), seen(FLOOR), LIMITS).state == GovernorState()
        assert decide(GovernorState(), seen(FLOOR - 1), LIMITS).state == stage_2()

    def test_one_byte_in_the_arena_is(self) -> None:
        decision = decide(GovernorState(), seen(arena=1), LIMITS)
        assert decision.state == stage_2(arena_high=1)
        assert decision.reason == "stage 1 -> 2: the overflow arena holds 1 B"

    def test_with_main_memory_already_short_does_not_wait_a_step_for_the_hard_one(self) -> None:
        decision = decide(GovernorState(), seen(arena=GIB, host=LIMITS.host_reserve - 1), LIMITS)
        assert decision.actions == (Action.LIGHT_RECLAMATION, Action.HARD_RECLAMATION)
        assert "8.00 GiB of main memory left, the reserve is 8.00 GiB" in decision.reason

    def test_main_memory_alone_is_the_watchdogs_business(self) -> None:
        assert decide(GovernorState(), seen(host=0), LIMITS).actions == ()

    def test_a_device_with_nothing_left_is_under_pressure_whatever_its_total(self) -> None:
        reading = MemoryReading(arena_active=0, device=DeviceReading(available=0, total=0), host_headroom=None)
        assert decide(GovernorState(), reading, LIMITS).state.stage == 2


class TestLeavingStage2:
    @given(prefix=st.lists(ANY), calm=st.lists(CALM_READING, min_size=3))
    def test_nothing_that_went_before_can_hold_it_back(
        self, prefix: list[MemoryReading], calm: list[MemoryReading]
    ) -> None:
        assert follow(GovernorState(), [*prefix, *calm])[-1].state == GovernorState()

    @given(PRESSURE, st.lists(CALM_READING, min_size=3, max_size=3))
    def test_takes_exactly_three_calm_samples(self, pressure: MemoryReading, calm: list[MemoryReading]) -> None:
        memory_stages = [decision.state.stage for decision in follow(GovernorState(), [pressure, *calm])]
        assert memory_stages == [2, 2, 2, 1]

    @given(st.lists(CALM_READING, min_size=2, max_size=2), IN_BAND | PRESSURE)
    def test_the_three_must_follow_each_other(self, two: list[MemoryReading], other: MemoryReading) -> None:
        decisions = follow(stage_2(), [*two, other, *two])
        assert [decision.state.stage for decision in decisions] == [2] * 5

    def test_an_unknown_sample_is_not_a_calm_one(self) -> None:
        decisions = follow(stage_2(calm=2), [seen(None), seen(), seen()])
        assert [decision.state.calm for decision in decisions] == [0, 1, 2]

    def test_exactly_floor_plus_band_is_not_calm(self) -> None:
        assert decide(stage_2(calm=2), seen(CALM), LIMITS).state == stage_2(calm=0)
        assert decide(stage_2(calm=2), seen(CALM + 1), LIMITS).state == GovernorState()

    def test_reclaims_nothing(self) -> None:
        decision = decide(stage_2(calm=2), seen(host=0), LIMITS)
        assert decision.actions == ()
        assert decision.reason == "stage 2 -> 1: calm for 3 samples; device available 50.0 GiB of 100 GiB, arena 0 B"


class TestInsideTheBand:
    @given(START, st.lists(IN_BAND, min_size=1))
    def test_nothing_moves(self, start: GovernorState, readings: list[MemoryReading]) -> None:
        decisions = follow(start, readings)
        assert changes(start, decisions) == 0
        assert all(decision.actions == () for decision in decisions)

    @given(START, st.integers(0, TOTAL - 5 * GIB), st.lists(st.integers(0, 5 * GIB), min_size=1))
    def test_what_moves_by_no_more_than_the_band_changes_the_stage_at_most_once(
        self, start: GovernorState, low: int, offsets: list[int]
    ) -> None:
        assert changes(start, follow(start, [seen(low + offset) for offset in offsets])) <= 1


class TestUnknown:
    @given(START, st.lists(st.builds(seen, st.none(), arena=st.sampled_from([None, 0]), host=st.none() | HOST)))
    def test_never_changes_the_stage(self, start: GovernorState, readings: list[MemoryReading]) -> None:
        assert changes(start, follow(start, readings)) == 0

    @given(START, CALM_READING)
    def test_of_the_arena_keeps_stage_2(self, start: GovernorState, calm: MemoryReading) -> None:
        blind = MemoryReading(arena_active=None, device=calm.device, host_headroom=calm.host_headroom)
        assert changes(start, follow(start, [blind] * 5)) == 0

    def test_does_not_hide_what_is_known(self) -> None:
        assert decide(GovernorState(), seen(None, arena=GIB), LIMITS).state.stage == 2
        assert decide(GovernorState(), seen(FLOOR - 1, arena=None), LIMITS).state.stage == 2

    @given(START, ANY)
    def test_is_reported_and_only_then(self, start: GovernorState, reading: MemoryReading) -> None:
        unknown = decide(start, reading, LIMITS).unknown
        missing = [value is None for value in (reading.arena_active, reading.device, reading.host_headroom)]
        assert len(unknown) == sum(missing)

    def test_main_memory_is_never_a_shortage(self) -> None:
        assert decide(stage_2(), seen(FLOOR, host=None), LIMITS).actions == ()


class TestHardReclamation:
    def test_when_main_memory_falls_under_its_reserve(self) -> None:
        enough, short = LIMITS.host_reserve, LIMITS.host_reserve - 1
        assert decide(stage_2(), seen(FLOOR, host=enough), LIMITS).actions == ()
        assert decide(stage_2(), seen(FLOOR, host=short), LIMITS).actions == (Action.HARD_RECLAMATION,)

    def test_when_the_arena_grows_but_not_when_it_comes_and_goes(self) -> None:
        sizes = [2 * GIB, 3 * GIB, 1 * GIB, 3 * GIB, 0, 2 * GIB, 4 * GIB]
        decisions = follow(GovernorState(), [seen(arena=size) for size in sizes])
        hard = [Action.HARD_RECLAMATION in decision.actions for decision in decisions]
        assert hard == [False, True, False, False, False, False, True]
        assert decisions[1].reason == "stage 2: the arena grew from 2.00 GiB to 3.00 GiB"

    def test_growth_is_counted_anew_in_every_stage_2(self) -> None:
        calm = [seen()] * 3
        decisions = follow(GovernorState(), [seen(arena=9 * GIB), *calm, seen(arena=GIB), seen(arena=2 * GIB)])
        assert decisions[-1].actions == (Action.HARD_RECLAMATION,)

    @given(st.lists(ANY))
    def test_stage_1_remembers_nothing(self, readings: list[MemoryReading]) -> None:
        for decision in follow(GovernorState(), readings):
            assert decision.state.stage == 2 or decision.state == GovernorState()


class TestLimits:
    @given(st.floats(0.001, 0.999), st.integers(0, 2 * TOTAL), st.integers(1, 200 * GIB))
    def test_the_larger_floor_counts(self, threshold: float, min_bytes: int, total: int) -> None:
        limits = PressureLimits(threshold, min_bytes, host_reserve=0)
        assert limits.floor(total) == max(int(threshold * total), min_bytes, 1)
        assert limits.calm_level(total) - limits.floor(total) == int(0.05 * total)

    def test_come_from_the_options(self) -> None:
        options = MemoryOptions(uvm_stage1_threshold=0.2, uvm_stage1_min_bytes=3 * GIB)
        assert PressureLimits.from_options(options, host_reserve=GIB) == PressureLimits(0.2, 3 * GIB, GIB)

    def test_that_leave_no_stage_1_are_rejected_at_the_first_sample_that_can_tell(self) -> None:
        machine = Scripted([seen(None), seen()])
        governor = Governor(machine, machine, PressureLimits(0.10, 97 * GIB, host_reserve=0))
        governor.sample()
        with pytest.raises(ConfigError) as caught:
            governor.sample()
        (problem,) = caught.value.problems
        assert problem.key == "memory.uvm_stage1_min_bytes"
        assert "97.0 GiB" in problem.found
        assert "uvm_stage1_min_bytes=0" in problem.hint

    @given(st.floats(0.001, 0.999), st.integers(0, 2 * TOTAL))
    def test_are_rejected_exactly_when_a_wholly_free_device_would_not_be_calm(self, share: float, least: int) -> None:
        limits = PressureLimits(share, least, host_reserve=0)
        ends = decide(stage_2(calm=2), seen(TOTAL), limits).state.stage == 1
        assert (limits.problem(TOTAL) is None) == ends


class Scripted:
    """A sequence of readings (the last one repeats), and a reclaimer that logs its calls."""

    def __init__(self, readings: list[MemoryReading]) -> None:
        self._readings: Iterator[MemoryReading] = iter(readings)
        self._now = readings[0]
        self.done: list[str] = []

    def read(self) -> MemoryReading:
        self._now = next(self._readings, self._now)
        return self._now

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def release_device_cache(self) -> None:
        self.done.append("release device cache")

    def release_host_caches(self) -> None:
        self.done.append("release host caches")

    def demote_cold(self, *, at_most: int, include_recent: bool) -> None:
        self.done.append(f"demote {'everything cold' if include_recent else 'cold'} up to {at_most // GIB} GiB")


class TestGovernor:
    def test_a_light_reclamation_does_not_stop_the_gpu(self) -> None:
        machine = Scripted([seen(arena=GIB, host=28 * GIB)])
        Governor(machine, machine, LIMITS).sample()
        assert machine.done == ["release device cache", "demote cold up to 10 GiB"]

    def test_a_hard_one_does_in_this_order(self) -> None:
        machine = Scripted([seen(arena=GIB), seen(arena=2 * GIB, host=12 * GIB)])
        governor = Governor(machine, machine, LIMITS)
        governor.sample()
        machine.done.clear()
        governor.sample()
        assert machine.done == [
            "synchronize",
            "release device cache",
            "release host caches",
            "demote everything cold up to 2 GiB",
        ]

    def test_memory_pressure_when_hard_reclamation_is_not_enough(self) -> None:
        machine = Scripted([seen(arena=GIB), seen(arena=GIB, host=GIB), seen(arena=GIB, host=2 * GIB)])
        governor = Governor(machine, machine, LIMITS)
        governor.sample()
        with pytest.raises(MemoryPressure) as caught:
            governor.sample()
        assert caught.value.headroom == 2 * GIB
        message = str(caught.value)
        assert "found     2.00 GiB left" in message
        assert "the overflow holds 1.00 GiB" in message
        assert "expected  at least the reserve of 8.00 GiB" in message
        assert "try       --set training.gradient_checkpointing=full" in message
        assert "synchronize" in machine.done
        assert governor.counters.hard_reclamations == 1

    def test_every_change_is_reported_before_memory_pressure_ends_the_run(self) -> None:
        short = GIB
        machine = Scripted([seen(arena=GIB), seen(arena=2 * GIB, host=short), seen(arena=2 * GIB, host=short)])
        changes: list[MemoryChange] = []
        governor = Governor(machine, machine, LIMITS, changes.append)
        governor.sample()
        entered = "stage 1 -> 2: the overflow arena holds 1.00 GiB"
        assert changes[:2] == [
            ArenaChange(0, GIB, "a step needed more than the device has"),
            MemoryStageChange(1, 2, entered),
        ]
        (light,) = changes[2:]
        assert isinstance(light, Reclamation)
        assert (light.action, light.reason) == (Action.LIGHT_RECLAMATION, entered)
        assert (light.released, light.demoted) == (None, None), "this reclaimer does not count"
        changes.clear()
        with pytest.raises(MemoryPressure):
            governor.sample()
        grown, hard = changes
        assert grown == ArenaChange(GIB, 2 * GIB, "it reached a new maximum")
        assert isinstance(hard, Reclamation)
        assert hard.action is Action.HARD_RECLAMATION

    @given(st.lists(ANY, min_size=1))
    def test_what_is_reported_agrees_with_the_counters(self, readings: list[MemoryReading]) -> None:
        machine = Scripted(readings)
        changes: list[MemoryChange] = []
        governor = Governor(machine, machine, PressureLimits(0.10, 0, host_reserve=0), changes.append)
        for _ in readings:
            governor.sample()
        memory_stages = [one for one in changes if isinstance(one, MemoryStageChange)]
        arena = [one for one in changes if isinstance(one, ArenaChange)]
        done = [one.action for one in changes if isinstance(one, Reclamation)]
        counted = governor.counters
        assert (len(memory_stages), done.count(Action.LIGHT_RECLAMATION)) == (
            counted.transitions,
            counted.light_reclamations,
        )
        assert done.count(Action.HARD_RECLAMATION) == counted.hard_reclamations
        assert [one.before for one in memory_stages] == [1, 2] * (len(memory_stages) // 2) + [1] * (
            len(memory_stages) % 2
        )
        assert max((one.after for one in arena), default=0) == counted.arena_peak

    def test_no_memory_pressure_when_it_is(self) -> None:
        machine = Scripted([seen(arena=GIB), seen(arena=GIB, host=GIB), seen(arena=0, host=9 * GIB)])
        governor = Governor(machine, machine, LIMITS)
        governor.sample()
        assert governor.sample().actions == (Action.HARD_RECLAMATION,)

    def test_an_arena_that_grows_with_main_memory_to_spare_stops_no_run(self) -> None:
        readings = [seen(arena=size * GIB) for size in (1, 2, 2, 3, 3, 4, 4)]  # each hard one reads twice
        machine = Scripted(readings)
        governor = Governor(machine, machine, LIMITS)
        for _ in range(4):
            governor.sample()
        assert governor.counters == Counters(1, 1, 3, 4 * GIB)

    @given(st.lists(ANY, min_size=1))
    def test_counters_only_grow_and_agree_with_what_happened(self, readings: list[MemoryReading]) -> None:
        # A reserve of 0 cannot be undercut, so that no sample ends in MemoryPressure; growth still reclaims hard.
        machine = Scripted(readings)
        governor = Governor(machine, machine, PressureLimits(0.10, 0, host_reserve=0))
        stage_changes = light = hard = 0
        for _ in readings:
            before, counters = governor.state, governor.counters
            decision = governor.sample()
            stage_changes += before.stage != governor.state.stage
            light += Action.LIGHT_RECLAMATION in decision.actions
            hard += Action.HARD_RECLAMATION in decision.actions
            now = governor.counters
            assert (now.transitions, now.light_reclamations, now.hard_reclamations) == (stage_changes, light, hard)
            assert now.arena_peak >= counters.arena_peak
        assert machine.done.count("synchronize") == hard
        assert machine.done.count("release device cache") == light + hard

    @given(HOST | st.none())
    def test_demotion_alone_never_uses_up_the_reserve(self, host: int | None) -> None:
        budget = demotion_budget(seen(host=host), LIMITS)
        assert budget >= 0
        if budget:
            assert host is not None
            assert host - budget > LIMITS.host_reserve
