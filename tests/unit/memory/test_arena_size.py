from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.errors import ConfigError
from gracetune.hardware.allocation import CAREFUL_CAP, GRANULE, host_reserve
from gracetune.hardware.machine import Cgroup
from gracetune.hardware.recording import load_recording
from gracetune.memory.arena_size import ArenaRoom, arena_size
from gracetune.units import GIB, MIB

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
GH200 = ArenaRoom(
    device_total=96 * GIB, host_available=460 * GIB, cgroup_available=None, reserve=46 * GIB, coherent=True
)  # fmt: skip

# Mostly the sizes of real machines: with sizes of any magnitude, the clamps that matter would hardly ever meet.
BYTES = st.integers(1, 1200).map(lambda halves: halves * GIB // 2) | st.integers(0, 1 << 42)
ROOMS = st.builds(
    ArenaRoom,
    device_total=BYTES,
    host_available=BYTES,
    cgroup_available=st.none() | BYTES,
    reserve=st.integers(0, 64 * GIB),
    coherent=st.sampled_from([True, False, None]),
    one_pool=st.booleans(),
)
RATIOS = st.floats(1.0, 10.0, exclude_min=True) | st.floats(1.0, 1e6, exclude_min=True)
OTHER = st.integers(0, 8 * GIB)


class TestNeverAbove:
    @given(ROOMS, RATIOS, OTHER, st.booleans())
    def test_any_clamp(self, room: ArenaRoom, ratio: float, other: int, force: bool) -> None:
        found = arena_size(room, ratio, other_managed=other, force=force)
        assert 0 <= found.bytes <= found.requested
        assert found.bytes % GRANULE == 0
        if found.bytes == 0:
            return
        assert room.device_total is not None
        assert room.host_available is not None
        assert found.requested == int((ratio - 1.0) * room.device_total)
        assert found.bytes + room.reserve + other <= room.host_available
        if room.cgroup_available is not None:
            assert found.bytes + room.reserve + other <= room.cgroup_available
        if not force and (room.one_pool or not room.coherent):
            assert found.bytes + other <= CAREFUL_CAP

    @given(ROOMS, RATIOS, OTHER, st.booleans())
    def test_and_never_needlessly_below(self, room: ArenaRoom, ratio: float, other: int, force: bool) -> None:
        found = arena_size(room, ratio, other_managed=other, force=force)
        bounds = {"none": found.requested, "MemAvailable": (room.host_available or 0) - room.reserve - other}
        if room.cgroup_available is not None:
            bounds["cgroup"] = room.cgroup_available - room.reserve - other
        if not force and (room.one_pool or not room.coherent):
            bounds["managed cap"] = CAREFUL_CAP - other
        tightest = max(0, min(bounds.values()))
        assert found.bytes == tightest // GRANULE * GRANULE
        assert max(0, bounds[found.clamp]) == tightest

    @given(ROOMS, RATIOS, RATIOS, OTHER, st.booleans())
    def test_a_larger_ratio_never_makes_it_smaller(
        self, room: ArenaRoom, one: float, two: float, other: int, force: bool
    ) -> None:
        small, large = (arena_size(room, ratio, other_managed=other, force=force).bytes for ratio in sorted((one, two)))
        assert small <= large

    @given(ROOMS, RATIOS, OTHER)
    def test_forcing_never_makes_it_smaller(self, room: ArenaRoom, ratio: float, other: int) -> None:
        plain = arena_size(room, ratio, other_managed=other)
        assert plain.bytes <= arena_size(room, ratio, other_managed=other, force=True).bytes

    @given(ROOMS, RATIOS, OTHER, st.booleans())
    def test_nothing_comes_with_a_reason(self, room: ArenaRoom, ratio: float, other: int, force: bool) -> None:
        found = arena_size(room, ratio, other_managed=other, force=force)
        assert found.reason.startswith("no arena: ") == (found.bytes == 0)


class TestTheReason:
    def test_as_asked(self) -> None:
        found = arena_size(GH200, 3.0)
        assert (found.bytes, found.clamp) == (192 * GIB, "none")
        assert found.reason == "as requested: (3 - 1) x 96.0 GiB of GPU memory = 192 GiB"

    def test_what_else_is_managed_is_named_and_taken_off(self) -> None:
        beside = arena_size(GH200, 3.0, other_managed=53 * GIB)
        assert beside.bytes == 192 * GIB
        assert beside.reason.endswith("= 192 GiB; in addition 53.0 GiB for managed caches and parked experts")
        less = arena_size(GH200, 5.0, other_managed=53 * GIB)
        assert less.bytes == (460 - 46 - 53) * GIB
        assert less.reason.endswith("less a reserve of 46.0 GiB and 53.0 GiB for managed caches and parked experts")

    def test_main_memory(self) -> None:
        found = arena_size(replace(GH200, host_available=200 * GIB), 5.0)
        assert (found.bytes, found.requested, found.clamp) == (154 * GIB, 384 * GIB, "MemAvailable")
        assert found.reason == (
            "154 GiB instead of (5 - 1) x 96.0 GiB of GPU memory = 384 GiB: "
            "200 GiB of main memory are available, less a reserve of 46.0 GiB"
        )

    def test_the_control_group(self) -> None:
        found = arena_size(replace(GH200, cgroup_available=64 * GIB), 5.0)
        assert (found.bytes, found.clamp) == (18 * GIB, "cgroup")
        assert found.reason.endswith("the control group leaves 64.0 GiB, less a reserve of 46.0 GiB")

    def test_no_coherent_link(self) -> None:
        found = arena_size(replace(GH200, coherent=False), 5.0, other_managed=GIB)
        assert (found.bytes, found.clamp) == (3 * GIB, "managed cap")
        assert "has no coherent link" in found.reason
        words = "stays under 4.00 GiB (1.00 GiB is for managed caches and parked experts); --force-oversubscription"
        assert words in found.reason

    def test_a_driver_that_does_not_say_gets_the_careful_answer(self) -> None:
        found = arena_size(replace(GH200, coherent=None), 5.0)
        assert (found.bytes, found.clamp) == (4 * GIB, "managed cap")
        assert "may have no coherent link" in found.reason

    def test_one_pool(self) -> None:
        found = arena_size(replace(GH200, one_pool=True), 5.0)
        assert (found.bytes, found.clamp) == (4 * GIB, "managed cap")
        assert "share one pool" in found.reason

    @pytest.mark.parametrize("room", [replace(GH200, coherent=False), replace(GH200, one_pool=True)])
    def test_force_lifts_the_cap_and_nothing_else(self, room: ArenaRoom) -> None:
        assert arena_size(room, 3.0, force=True).bytes == 192 * GIB
        assert arena_size(room, 50.0, force=True).clamp == "MemAvailable"

    def test_nothing_left(self) -> None:
        found = arena_size(replace(GH200, host_available=46 * GIB), 5.0)
        assert (found.bytes, found.clamp) == (0, "MemAvailable")
        assert found.reason.startswith(
            "no arena: (5 - 1) x 96.0 GiB of GPU memory = 384 GiB was requested, but 46.0 GiB"
        )

    @pytest.mark.parametrize("what", ["device_total", "host_available"])
    def test_unknown(self, what: str) -> None:
        found = arena_size(replace(GH200, **{what: None}), 5.0)
        assert (found.bytes, found.clamp) == (0, "unknown")
        assert "unknown" in found.reason

    def test_too_little_to_be_worth_a_block(self) -> None:
        found = arena_size(replace(GH200, device_total=MIB), 1.5)
        assert (found.bytes, found.clamp) == (0, "none")
        assert "less than one block of 2.00 MiB" in found.reason


@pytest.mark.parametrize("ratio", [1.0, 0.5, -3.0, math.nan, math.inf])
def test_a_ratio_that_asks_for_nothing_is_rejected(ratio: float) -> None:
    with pytest.raises(ConfigError) as caught:
        arena_size(GH200, ratio)
    (problem,) = caught.value.problems
    assert problem.key == "memory.uvm_oversubscription_ratio"
    assert problem.found == str(ratio)


class TestRoomOfAMachine:
    def test_gh200(self) -> None:
        machine = load_recording(MACHINES / "gh200-numa")
        room = ArenaRoom.of(machine)
        assert room.coherent is True
        assert not room.one_pool
        assert room.reserve == host_reserve(machine)
        assert room.host_available == machine.host.cpu_mem_available
        assert arena_size(room, 5.0).bytes > 100 * GIB

    @pytest.mark.parametrize("name", ["x86-h200", "x86-h200-cgroup", "gb10"])
    def test_no_ratio_lifts_the_cap_of_the_others(self, name: str) -> None:
        room = ArenaRoom.of(load_recording(MACHINES / name))
        assert 0 < arena_size(room, 100.0).bytes <= CAREFUL_CAP

    def test_without_a_gpu_there_is_none(self) -> None:
        assert arena_size(ArenaRoom.of(load_recording(MACHINES / "cpu-only")), 5.0).bytes == 0

    def test_a_control_group_counts(self) -> None:
        machine = load_recording(MACHINES / "x86-h200-cgroup")
        assert machine.host.cgroup is not None
        assert ArenaRoom.of(machine).cgroup_available == machine.host.cgroup.available
        assert machine.host.cgroup.available is not None

    def test_a_limit_without_a_measure_is_unknown_not_unlimited(self) -> None:
        machine = load_recording(MACHINES / "gh200-numa")
        blind = machine.host.model_copy(update={"cgroup": Cgroup(version=2, limit=64 * GIB)})
        assert arena_size(ArenaRoom.of(machine.model_copy(update={"host": blind})), 5.0).clamp == "unknown"
